"""Generate text from Python.

python examples/generate.py [MODEL]
"""

import sys

from paceline import LLM, SamplingParams

with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m") as llm:
    params = SamplingParams(n=2, temperature=0.8, max_tokens=24, seed=1, logprobs=3, repetition_penalty=1.1)
    for request in llm.generate(["The capital of France is", "1, 2, 3, 4,"], params):
        for output in request.outputs:
            drafted = sum(output.drafted)
            print(f"{request.prompt!r} → {output.text!r}: {len(output.token_ids)} tokens, {drafted} of them drafted")

    (answer,) = llm.chat([{"role": "user", "content": "What is 3 + 4?"}], SamplingParams(temperature=0, max_tokens=24))
    print(answer.outputs[0].text)
