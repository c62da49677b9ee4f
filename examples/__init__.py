"""Examples, one idea a file; the tests run every one of them."""
