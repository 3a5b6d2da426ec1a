"""What operators do with the KV of documents, by the command line and by HTTP. Starts no model."""
