"""One model over HTTP: OpenAI's completions, the library's exact queries, and a page to explore it."""
