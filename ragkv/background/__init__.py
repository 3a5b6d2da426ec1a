"""Work that waits until nobody waits for an answer."""
