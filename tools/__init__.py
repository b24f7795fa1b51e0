"""What writes files that are shipped or shown: workflows, pictures, texts, tables; and tiny models for tests."""
