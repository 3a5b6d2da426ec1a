"""Documents to stored chunks: indexing, uploads, deletion."""
