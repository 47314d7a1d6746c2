"""Other people's engines and runtimes: the only files that import vllm or ray."""
