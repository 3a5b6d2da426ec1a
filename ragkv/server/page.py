"""The page at `/`: its files, as the package has them. Its scripts call the API."""

import hashlib
from importlib import resources

from fastapi import APIRouter, HTTPException, Request, Response

_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Names and texts of documents are untrusted: nothing runs or loads but the page's own files, and no text becomes
# markup, not even by a mistake in a script.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Cache-Control": "no-cache",  # browsers ask each time; it is sent again only if it changed
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page() -> APIRouter:
    """Return the routes of the page's files. They need no key: the scripts ask for it and send it to the API."""
    files = {
        file.name: file.read_bytes()
        for file in resources.files("ragkv.server").joinpath("page").iterdir()
        if file.name.rpartition(".")[2] in _MEDIA_TYPES
    }
    etags = {name: f'"{hashlib.sha256(content).hexdigest()[:16]}"' for name, content in files.items()}
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    @router.get("/page/{file}")
    async def send(request: Request, file: str = "index.html") -> Response:
        if file not in files:
            raise HTTPException(404, f"the page has no file {file!r}")
        headers = {**_HEADERS, "ETag": etags[file]}
        if etags[file] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(files[file], headers=headers, media_type=_MEDIA_TYPES[file.rpartition(".")[2]])

    return router
