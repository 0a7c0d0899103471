import instructor
import openai
import pytest

from tests.clients.weather import MAX_TOKENS, QUESTION, Weather


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA], ids=lambda mode: str(mode.value))
def test_a_response_model(base_url: str, model: str, mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=base_url, api_key="any", max_retries=0), mode=mode)
    answer = client.chat.completions.create(
        model=model,
        response_model=Weather,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        max_retries=0,
    )
    assert isinstance(answer, Weather)
