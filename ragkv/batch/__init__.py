"""Many requests from a file, of which none is urgent: those that share text run together, and each is answered once."""
