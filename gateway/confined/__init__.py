"""Work that a request asks for and that could take any time or memory, done in processes that can be ended."""
