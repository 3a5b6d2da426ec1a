"""Work that is done while no request is being answered."""
