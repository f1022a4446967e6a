"""What the benchmark scripts share: figures, reports, engines in two processes, and vLLM's own way beside ours."""
