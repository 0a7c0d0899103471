"""What is to be copied, found by looking at all places."""


def copied(texts: list[list[int]], min_n: int, max_n: int) -> int | None:
    """What followed the longest match of the end of texts[0], there or in the others; the latest in the first that has
    one so long.
    """
    tokens, best, found = texts[0], min_n - 1, None
    for text in texts:
        for end in reversed(range(min_n, len(text))):
            length = 0
            while length < min(max_n, end, len(tokens)) and text[end - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > best:
                best, found = length, text[end]
    return found
