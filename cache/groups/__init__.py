"""KV cache groups other than full attention: sliding windows, chunked attention and recurrent states."""
