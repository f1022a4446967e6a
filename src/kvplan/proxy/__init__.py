"""A small streaming router for prefill and decode engines. It moves no cache; it carries `kv_transfer_params`.

Needs the extra `kvplan[proxy]` (starlette, httpx, uvicorn).
"""

from kvplan.proxy.app import COMPLETION_PATHS, build_app
from kvplan.proxy.serving import serve, serve_in_thread

__all__ = ["COMPLETION_PATHS", "build_app", "serve", "serve_in_thread"]
