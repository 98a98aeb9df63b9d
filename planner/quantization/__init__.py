"""Weight quantization: how many bytes each tensor has in the file, after load and after warm-up, by format."""
