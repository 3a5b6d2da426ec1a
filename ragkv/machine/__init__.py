"""Facts and settings of the machine."""
