from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from tests.clients.weather import MAX_TOKENS, QUESTION, Weather


def test_structured_answers(base_url: str, model: str) -> None:
    llm = OpenAILike(
        model=model,
        api_base=base_url,
        api_key="any",
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=MAX_TOKENS,
        temperature=0,
        context_window=2048,
        max_retries=0,
    )
    answer = llm.as_structured_llm(Weather).chat([ChatMessage(role="user", content=QUESTION)])
    assert isinstance(answer.raw, Weather)
