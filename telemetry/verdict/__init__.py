"""Why was this request lost? The servable boundary by definition, a search, and a judgement."""
