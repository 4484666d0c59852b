"""The server and the client over real sockets, and the client against servers that misbehave."""

import asyncio
import contextlib
import http.server
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from aiohttp import web

from trace_jax.retrieval import bm25, server
from trace_jax.retrieval.base import Passage, RetrievalError
from trace_jax.retrieval.client import SearchService

PASSAGES = [
    Passage("Loire", "The Loire is the longest river of France.", id="l"),
    Passage("Rhône", "A river of Switzerland and France 🦎.\nIt ends in the sea."),
    Passage("", "untitled river"),
]


@contextlib.contextmanager
def running(app):
    """The address of an aiohttp application that runs in a thread."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    runner, urls = web.AppRunner(app), []

    async def start():
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()

    def work():
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(10)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return bm25.build(PASSAGES, tmp_path_factory.mktemp("service") / "index")


@pytest.fixture(scope="module")
def url(index):
    with running(server.make_app(index)) as address:
        yield address


@contextlib.contextmanager
def service(url, **settings):
    client = SearchService(url, **{"retry_wait": 0.01, **settings})
    try:
        yield client
    finally:
        client.close()


# --- the protocol


def test_the_reply_is_the_protocols_to_the_letter(url):
    reply = httpx.post(f"{url}/retrieve", json={"queries": ["Loire", "zzz"], "topk": 3, "return_scores": True}).json()
    score = reply["result"][0][0].pop("score")
    assert reply == {
        "result": [[{"document": {"id": "l", "contents": '"Loire"\nThe Loire is the longest river of France.'}}], []]
    }
    assert 0.5 < score < 2


def test_without_scores_the_documents_stand_alone(url):
    for request in ({"queries": ["sea"]}, {"queries": ["sea"], "topk": 0, "return_scores": False}):
        assert httpx.post(f"{url}/retrieve", json=request).json() == {
            "result": [[{"contents": '"Rhône"\nA river of Switzerland and France 🦎.\nIt ends in the sea.'}]]
        }


def test_topk_bounds_the_passages_and_is_three_if_left_out(tmp_path):
    index = bm25.build([Passage("", f"same {i}") for i in range(5)], tmp_path / "index")
    with running(server.make_app(index)) as url:
        count = lambda **topk: len(
            httpx.post(f"{url}/retrieve", json={"queries": ["same"], **topk}).json()["result"][0]
        )
        assert [count(), count(topk=None), count(topk=1), count(topk=1000)] == [3, 3, 1, 5]


def test_health_says_what_is_served(url):
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "kind": "bm25", "passages": 3}


@pytest.mark.parametrize(
    "body, detail",
    [
        (b"not json", "the body is no JSON"),
        (b"[]", "the body must be a JSON object"),
        (b"{}", "queries must be a list of strings"),
        (b'{"queries": "one"}', "queries must be a list of strings"),
        (b'{"queries": [1]}', "queries must be a list of strings"),
        (b'{"queries": ["a"], "topk": -1}', "topk must be an integer in 1..1000"),
        (b'{"queries": ["a"], "topk": 1001}', "topk must be an integer in 1..1000"),
        (b'{"queries": ["a"], "topk": "3"}', "topk must be an integer in 1..1000"),
        (b'{"queries": ["a"], "topk": true}', "topk must be an integer in 1..1000"),
        (b'{"queries": ["a"], "return_scores": 1}', "return_scores must be true or false"),
        (json.dumps({"queries": [""] * 1025}).encode(), "1025 queries; at most 1024"),
    ],
)
def test_a_malformed_request_is_named(url, body, detail):
    reply = httpx.post(f"{url}/retrieve", content=body)
    assert reply.status_code == 422 and reply.json()["detail"].startswith(detail)


def test_a_huge_request_is_refused(url):
    assert httpx.post(f"{url}/retrieve", content=b" " * (5 * 2**20)).status_code == 413


# --- client and server together


@pytest.mark.parametrize("query", ["Loire river", "Rhône", "🦎", "", "\ud800", "untitled", "x" * 100_000])
def test_a_search_over_the_wire_is_the_search_itself(url, index, query):
    with service(url) as client:
        assert client.search(query, 2) == index.search(query, 2)


def test_the_address_may_name_the_path(url):
    with service(f"{url}/retrieve/") as client:
        assert client.search("sea", 1)[0].title == "Rhône"


def test_threads_share_a_client(url, index):
    with service(url) as client, ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: client.search("river France", 3), range(100)))
    assert all(each == index.search("river France", 3) for each in found)


def test_what_the_server_refuses_is_not_tried_again(url):
    with service(url) as client:
        with pytest.raises(RetrievalError, match=r"/retrieve: status 422: .*topk must be an integer"):
            client.search("x", 5000)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"url": "localhost:8000"}, "must begin with http:// or https://"),
        ({"timeout": 0}, "timeout is 0, must be positive"),
        ({"attempts": 0}, "attempts is 0, must be positive"),
        ({"deadline": float("nan")}, "deadline is nan, must be positive"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SearchService(**{"url": "http://localhost", **settings})


# --- servers that misbehave


GOOD = json.dumps({"result": [[{"document": {"contents": '"T"\nx'}, "score": 1.5}]]}).encode()


@contextlib.contextmanager
def stand_in(*answers):
    """A server that gives the answers in turn, the last one for ever: (status, body) or a function of the handler."""
    given = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            answer = answers[min(len(given), len(answers) - 1)]
            given.append(answer)
            if callable(answer):
                answer(self)
                return
            status, body = answer
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads, httpd.block_on_close, httpd.handle_error = True, False, lambda *_: None
    thread = threading.Thread(target=lambda: httpd.serve_forever(poll_interval=0.01))
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}", given
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def hang(handler):
    time.sleep(1.0)
    handler.close_connection = True


def drip(handler):
    """A reply that never ends, a byte now and then: no single read takes long."""
    handler.send_response(200)
    handler.send_header("content-length", "1000000")
    handler.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(60):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.02)
    handler.close_connection = True


def hang_up(handler):
    handler.close_connection = True


def cut_off(handler):
    handler.send_response(200)
    handler.send_header("content-length", "100")
    handler.end_headers()
    handler.wfile.write(GOOD[:20])
    handler.close_connection = True


BAD = [
    (500, b"oops"),
    (503, b""),
    (429, b"slow down"),
    (408, b""),
    hang_up,
    cut_off,
    (200, b""),
    (200, GOOD[:-4]),
    (200, b"<html>"),
    (200, b'{"results": []}'),
    (200, b'{"result": []}'),
    (200, b'{"result": [[], []]}'),
    (200, b'{"result": [{"document": "x", "score": 1}]}'),
    (200, b'{"result": ["text"]}'),
    (200, b'{"result": [[{"document": {"contents": "x"}}]]}'),
    (200, b'{"result": [[{"document": {"contents": "x"}, "score": "1"}]]}'),
    (200, b'{"result": [[{"document": {"body": "x"}, "score": 1}]]}'),
    (200, b'{"result": [[{"document": [1], "score": 1}]]}'),
    (200, b'{"result": [[3]]}'),
    (200, b'{"result": [[null]]}'),
    (200, b'{"result": 3}'),
    (200, b"\xff\xfe"),
]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_answer_is_tried_again(bad):
    with stand_in(bad, (200, GOOD)) as (url, given), service(url) as client:
        assert client.search("q", 3) == [Passage("T", "x", 1.5)]
    assert len(given) == 2


def test_bad_answers_without_end_are_given_up():
    for bad, reason in [((500, b""), "status 500"), ((200, b"{"), "none of the protocol"), (hang_up, "disconnected")]:
        with stand_in(bad) as (url, given), service(url, attempts=3) as client:
            with pytest.raises(RetrievalError, match=rf"{url}/retrieve: .*{reason}.* \(tries: 3\)") as error:
                client.search("q", 3)
        assert len(given) == 3 and "\n" not in str(error.value)


@pytest.mark.parametrize("slow, timeout", [(hang, 0.1), (hang, 10), (drip, 0.1)])
def test_a_slow_server_costs_bounded_time(slow, timeout):
    with stand_in(slow) as (url, _), service(url, timeout=timeout, attempts=100, deadline=0.4) as client:
        start = time.monotonic()
        with pytest.raises(RetrievalError, match="in time"):
            client.search("q", 3)
        assert time.monotonic() - start < 0.9


def test_a_reply_without_end_is_not_kept(monkeypatch):
    monkeypatch.setattr("trace_jax.retrieval.client._MOST_BYTES", 1000)
    with stand_in((200, b" " * 5000)) as (url, _), service(url, attempts=1) as client:
        with pytest.raises(RetrievalError, match="a reply of more than 1000 bytes"):
            client.search("q", 3)


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with service(f"http://127.0.0.1:{port}", attempts=2) as client:
        with pytest.raises(RetrievalError, match=r"ConnectError: .* \(tries: 2\)"):
            client.search("q", 3)


@pytest.mark.parametrize(
    "document, passage",
    [
        ({"id": 7, "contents": '"T"\nx'}, Passage("T", "x", 1.0, "7")),
        ({"contents": "no title\nline"}, Passage("", "no title\nline", 1.0)),
        ({"title": "T", "text": "x", "contents": '"U"\ny'}, Passage("U", "y", 1.0)),
        ({"title": "T", "text": "x"}, Passage("T", "x", 1.0)),
        ({"text": "x"}, Passage("", "x", 1.0)),
        ("a document as a mere text", Passage("", "a document as a mere text", 1.0)),
    ],
)
def test_documents_of_other_servers(document, passage):
    scored, bare = [{"document": document, "score": 1}], [document]
    for row, score in ((scored, 1.0), (bare, 0.0)):
        body = json.dumps({"result": [row]}).encode()
        with stand_in((200, body)) as (url, _), service(url) as client:
            assert client.search("q", 3) == [Passage(passage.title, passage.text, score, passage.id)]


def test_more_passages_than_asked_for_are_cut():
    body = json.dumps({"result": [["a", "b", "c"]]}).encode()
    with stand_in((200, body)) as (url, _), service(url) as client:
        assert [p.text for p in client.search("q", 2)] == ["a", "b"]
