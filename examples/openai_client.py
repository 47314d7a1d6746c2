"""OpenAI's client with `paceline serve`: a stream, and samples with token ids.

paceline serve smollm2-135m &
pip install openai
python examples/openai_client.py [URL]
"""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is 3 + 4?"}]

for event in client.chat.completions.create(model=model, messages=messages, seed=1, max_tokens=32, stream=True):
    print(event.choices[0].delta.content or "", end="", flush=True)
print()

# Token ids in and out: the next turn of a conversation can continue from exactly these tokens.
answer = client.completions.create(
    model=model, prompt="1, 2, 3,", n=2, seed=1, max_tokens=16, logprobs=1, extra_body={"return_token_ids": True}
)
for choice in answer.choices:
    print(f"{choice.text!r}: {choice.token_ids}, logprob {sum(choice.logprobs.token_logprobs):.2f}")
prompt = answer.choices[0].prompt_token_ids + answer.choices[0].token_ids
print(repr(client.completions.create(model=model, prompt=prompt, seed=2, max_tokens=16).choices[0].text))
