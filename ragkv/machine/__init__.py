"""What is known of the machine, and settings of its C library."""
