"""The forms of one answer: OpenAI's chat, Responses, and Anthropic's Messages. Start at `layers.py`."""
