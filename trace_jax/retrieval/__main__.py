"""Builds and serves an index of passages.

    python -m trace_jax.retrieval build --corpus=wiki-18.jsonl.gz --index=indexes/wiki --kind=bm25
    python -m trace_jax.retrieval serve --index=indexes/wiki --port=8000
"""

from __future__ import annotations

import argparse
import ipaddress
import sys
from pathlib import Path

from trace_jax.retrieval import bm25, corpus, dense, indexes, server
from trace_jax.retrieval.base import CorpusError, IndexFolderError


def build(arguments: argparse.Namespace) -> None:
    """Builds the index that the arguments ask for and says where it is."""
    passages = corpus.read(arguments.corpus, progress=True)
    source = arguments.corpus.name
    if arguments.kind == bm25.KIND:
        index = bm25.build(passages, arguments.index, progress=True, source=source)
    else:
        encoder = dense.Encoder(arguments.model, device=arguments.device, batch_size=arguments.batch_size)
        index = dense.build(passages, arguments.index, encoder, progress=True, source=source)
    print(f"{index.kind} index of {len(index)} passages written to {arguments.index}")


def serve(arguments: argparse.Namespace) -> None:
    """Serves the index until it is interrupted."""
    index = indexes.load(arguments.index, model=arguments.model, device=arguments.device)
    if not _is_local(arguments.host):
        print(f"warning: {arguments.host} may be reached by other machines; whoever can, may search", file=sys.stderr)
    said = f"{index.kind} index of {len(index)} passages"
    server.serve(
        index,
        host=arguments.host,
        port=arguments.port,
        started=lambda url: print(f"serving the {said} on {url}", flush=True),
    )


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trace_jax.retrieval", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="build | serve")
    one = commands.add_parser("build", help="write an index of a corpus file")
    one.add_argument("--corpus", type=Path, required=True, help="JSON lines, may be gzipped; see retrieval/corpus.py")
    one.add_argument("--index", type=Path, required=True, help="folder to write")
    one.add_argument("--kind", choices=(bm25.KIND, dense.KIND), default=bm25.KIND)
    one.add_argument("--model", default="intfloat/e5-base-v2", help="e5: folder or name of the encoder")
    one.add_argument("--batch_size", type=int, default=64, help="e5: passages embedded at once")
    one.add_argument("--device", default="cpu", help="e5: cpu or cuda")
    one.set_defaults(run=build)
    two = commands.add_parser("serve", help="answer searches over HTTP")
    two.add_argument("--index", type=Path, required=True, help="folder of the index")
    two.add_argument("--host", default="127.0.0.1", help="address to listen on; the default is this machine alone")
    two.add_argument("--port", type=int, default=8000, help="0: any free one")
    two.add_argument("--model", default="", help="e5: the encoder, if it lies elsewhere than when the index was built")
    two.add_argument("--device", default="cpu", help="e5: cpu or cuda")
    two.set_defaults(run=serve)
    return parser


def main() -> None:
    """Parses the command line and does it; a mistake is one line."""
    arguments = _parser().parse_args()
    try:
        arguments.run(arguments)
    except (CorpusError, dense.DenseError, IndexFolderError, OSError, OverflowError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted: nothing of the unfinished index was kept", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
