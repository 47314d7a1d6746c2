"""Speculative rollouts for somebody else's training loop: prompts in, token ids, logprobs and versions out.

python examples/rollouts.py [MODEL]
"""

import sys

from paceline.build.config import load_config
from paceline.build.engine import build_engine
from paceline.chat.template import encode
from paceline.model.weights import hf_state
from paceline.types import Request, SamplingParams, noise_key

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
engine = build_engine(load_config(None, [f"model.name={model!r}", "speculation.method=suffix"]))
questions = ["What is 3 + 4?", "Name a colour of the rainbow."]
sampling = SamplingParams(temperature=1.0, max_tokens=24)

for step in range(2):
    requests = [
        Request(4 * i + j, encode(engine.tokenizer, question), sampling, noise_key(step, i, j), problem=question)
        for i, question in enumerate(questions)
        for j in range(4)
    ]
    for completion in engine.generate(requests):
        text = engine.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        print(f"version {completion.versions[0]}, logprob {completion.logprobs.sum():7.2f}: {text!r}")

    # Your own update goes here. The engine takes weights under their Hugging Face names, such as
    # your_model.state_dict().items(); here they are its own.
    new_weights = [(name, tensor.clone()) for name, tensor in hf_state(engine.paged.decoder)]
    receipt = engine.update_weights(new_weights, version=step + 1)
    print(f"version {receipt.version} is in place: {receipt.num_tensors} tensors, checksum {receipt.checksum[:12]}")
