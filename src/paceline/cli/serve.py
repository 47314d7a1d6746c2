"""`paceline serve`: an OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from paceline.cli.app import ConfigFile, Overrides, command, err, out, print_note, settings, split_settings

NEEDED = ("starlette", "uvicorn", "prometheus_client")


@command()
def serve(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL] [A.B=C]…", help="Known name, directory or hub id of the model; and settings."),
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than loopback need an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that clients must send; better in the environment variable PACELINE_API_KEY."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in the API.", show_default="MODEL")
    ] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests in progress; more get status 429.")] = 1024,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Maximum size of a request's body.")] = 8,
    max_samples: Annotated[int, typer.Option(min=1, help="Maximum samples of a request: prompts times n.")] = 128,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens per completion.", show_default="the model's context")
    ] = None,
    drain_s: Annotated[
        float, typer.Option(min=0, help="On SIGTERM or Ctrl-C, seconds in which running requests may finish.")
    ] = 30.0,
) -> None:
    """Serve a model with the OpenAI API and speculative decoding.

    Routes: /v1/completions, /v1/chat/completions, /v1/models, /inference/v1/generate (token ids in and out), /health
    and /metrics.

    Examples:

    - `paceline serve smollm2-135m`
    - `paceline serve Qwen/Qwen3-8B model.device=cuda speculation.head=my-head --port 8001`
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"`serve` needs {' and '.join(missing)}; run: pip install 'paceline[serve]'")
    from paceline.serve.limits import Limits
    from paceline.serve.server import api_key_of, bind, check_address, run

    models, given = split_settings(arguments, overrides)
    if len(models) > 1:
        raise ValueError(f"two models, {models[0]} and {models[1]}; a server has one")
    cfg = settings(config, given, model__name=models[0] if models else None)
    key = api_key_of(api_key)
    check_address(host, key)
    with bind(host, port) as bound:
        from paceline.async_llm import AsyncLLM
        from paceline.serve.api import Api
        from paceline.serve.metrics import ServerMetrics

        limits = Limits(
            max_body_bytes=max_body_mb << 20, max_requests=max_requests, max_samples=max_samples, max_tokens=max_tokens
        )
        metrics = ServerMetrics()
        with err.status(f"loading {cfg.model.name}"):
            llm = AsyncLLM.from_config(cfg, metrics.add_traces)
        metrics.engine = llm.llm.engine
        api = Api(llm, served_model_name or cfg.model.name, limits, key, drain_s, metrics)
        run(api, bound, lambda url: out.print(f"serving {api.model_name} at {url}", soft_wrap=True))
    print_note("stopped")
