"""The vLLM side of kv-singleflight: the only package here that imports vllm."""
