"""The attempts themselves; `escapes` says what <FOLDER>, <TCP> and the other names stand for.

None does harm where it gets through: what is written to is opened and left as it is, bombs are not tried without need.
"""

from __future__ import annotations

from dataclasses import dataclass

VARIABLE = "TRACE_JAX_ESCAPE_SECRET"  # in the trainer's environment


@dataclass(frozen=True)
class Escape:
    """One attempt. The code prints ESCAPED, or the secret, if it got through."""

    name: str
    code: str
    ends: tuple[str, ...]  # of `result.ENDS`, those that are right
    after: str = "print(1)"  # the next call, which prints 1 if this one has left nothing
    needs: str = ""  # what the pool must promise for it to be tried: without, it would harm this machine


_ERROR, _TIMEOUT = ("error",), ("timeout",)
_LIBC = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"

_SECRETS = (
    Escape("environment", f"import os\nprint(dict(os.environ)['{VARIABLE}'])", _ERROR),
    Escape("environment in C", f"{_LIBC}libc.getenv.restype = ctypes.c_char_p\n"
           f"value = libc.getenv(b'{VARIABLE}')\nif value: print(value)\nelse: raise KeyError", _ERROR),
    Escape("environment in /proc/self", "print(open('/proc/self/environ').read())", _ERROR),
    Escape("environment of the trainer", "print(open('/proc/<TRAINER>/environ').read())", _ERROR),
    Escape("memory of the trainer", "open('/proc/<TRAINER>/mem', 'rb').read(1)\nprint('ESCAPED')", _ERROR),
    Escape("a file outside", "print(open(<FOLDER> + '/secret').read())", _ERROR),
    Escape("a file outside by a link", "import os\nos.symlink(<FOLDER> + '/secret', 'x')\nprint(open('x').read())",
           _ERROR),
    Escape("a file outside by ..", "print(open('../' * 20 + <FOLDER> + '/secret').read())", _ERROR),
    Escape("the list of users", "open('/etc/passwd').read()\nprint('ESCAPED')", _ERROR),
    Escape("the disk itself", "import os\nfor name in os.listdir('/dev'): print('ESCAPED', name)", _ERROR),
    Escape("the code of an earlier call", "private = 'the earlier ' + 'call'\nprint(private)", ("ok",),
           after="import gc\nfound = [o for o in gc.get_objects() if isinstance(o, dict) and 'private' in o]\n"
                 "print(len(found) + 1)"),
)  # fmt: skip

_FILES = (
    Escape("writing outside", "open(<FOLDER> + '/new', 'w').write('x')\nprint('ESCAPED')", _ERROR),
    Escape("changing a file outside", "open(<FOLDER> + '/secret', 'a').write('x')\nprint('ESCAPED')", _ERROR),
    Escape("removing a file outside", "import os\nos.unlink(<FOLDER> + '/secret')\nprint('ESCAPED')", _ERROR),
    Escape("a file in the installation", "import os\nos.open(os.path.dirname(os.__file__), os.O_TMPFILE | 1)\n"
           "print('ESCAPED')", _ERROR),
    Escape("changing the installation", "import os\nos.open(os.__file__, os.O_WRONLY)\nprint('ESCAPED')", _ERROR),
    Escape("a file for the next call", "open('left', 'w').write('x')\nprint('written')", ("ok",),
           after="import os\nprint(len(os.listdir('.')) + 1)"),
    Escape("a folder too deep to remove", "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')",
           ("error", "timeout"),
           after="import os\nprint(len(os.listdir('.')) + 1)"),
    Escape("one file that fills the disk", "with open('x', 'wb') as file:\n"
           "    while True: file.write(bytes(1 << 20))", _ERROR),
    Escape("files that fill the disk", "for n in range(10**6):\n    open(str(n), 'wb').write(bytes(1 << 16))",
           ("error", "timeout")),
    Escape("files without end", "import os\nfor n in range(10**9): os.close(os.open(str(n), os.O_CREAT))",
           ("error", "timeout")),
    Escape("open files without end", "files = []\nwhile True: files.append(open('/dev/null'))", _ERROR),
    Escape("pipes without end", "import os\nwhile True: os.write(os.pipe()[1], bytes(1 << 15))", _ERROR),
)  # fmt: skip

_NETWORK = (
    Escape("a TCP connection", "import socket\nsocket.create_connection(<TCP>, 1)\nprint('ESCAPED')", _ERROR),
    Escape("a datagram", "import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', <UDP>)\nprint('ESCAPED')",
           _ERROR),
    Escape("a name server", "import socket\nsocket.getaddrinfo('example.com', 80)\nprint('ESCAPED')", _ERROR),
    Escape("a unix socket", "import socket\nsocket.socket(socket.AF_UNIX).connect(<UNIX>)\nprint('ESCAPED')", _ERROR),
    Escape("an abstract socket", "import socket\nsocket.socket(socket.AF_UNIX).connect(<ABSTRACT>)\n"
           "print('ESCAPED')",
           _ERROR),
    Escape("a listener", "import socket\nsocket.create_server(('127.0.0.1', 0))\nprint('ESCAPED')", _ERROR),
    Escape("a download", "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:%d/' % <TCP>[1])\n"
           "print('ESCAPED')", _ERROR),
    Escape("a browser", "import webbrowser\nif webbrowser.open('http://127.0.0.1:%d/' % <TCP>[1]): print('ESCAPED')\n"
           "else: raise OSError('no browser')", _ERROR),
    Escape("import antigravity", "import antigravity", ("ok", "error")),
)  # fmt: skip

_PROCESSES = (
    Escape("killing another process", "import os\nos.kill(<VICTIM>, 9)\nprint('ESCAPED')", _ERROR, needs="processes"),
    Escape("a signal to the trainer", "import os\nos.kill(<TRAINER>, 0)\nprint('ESCAPED')", _ERROR),
    Escape("killing its parent", "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(0.05)\nprint('ESCAPED')",
           _ERROR, needs="processes"),
    Escape("tracing another process", f"{_LIBC}if libc.ptrace(16, <VICTIM>, 0, 0) == 0: print('ESCAPED')\n"
           "else: raise OSError(ctypes.get_errno(), 'ptrace')", _ERROR),
    Escape("reading another's memory", f"{_LIBC}buffer = ctypes.create_string_buffer(8)\n"
           "pair = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)\n"
           "if libc.process_vm_readv(<TRAINER>, pair, 1, pair, 1, 0) >= 0 or ctypes.get_errno() not in (1, 3):\n"
           "    print('ESCAPED')\nelse: raise OSError(ctypes.get_errno(), 'process_vm_readv')", _ERROR),
    Escape("limits of another process", "import resource\n"
           "resource.prlimit(<VICTIM>, resource.RLIMIT_CPU, (1, 1))\nprint('ESCAPED')", _ERROR,
           needs="processes"),
    Escape("a fork bomb", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", _TIMEOUT,
           needs="processes"),
    Escape("a thread bomb", "import threading, time\nthreading.stack_size(1 << 16)\n"
           "while True: threading.Thread(target=time.sleep, args=(60,)).start()", ("error", "timeout", "killed"),
           needs="processes"),
    Escape("a daemon", "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
           "        time.sleep(60)\n    os._exit(0)\nprint('ESCAPED')", _ERROR,
           needs="processes"),
    Escape("a program", "import subprocess\nprint('ESCAPED', subprocess.run(['/bin/sh', '-c', 'id']))", _ERROR),
    Escape("a program in its place", "import os, sys\nos.execv(sys.executable, ['python', '-c', 'print(\"ESCAPED\")'])",
           _ERROR),
    Escape("os.system", "import os\nif os.system('echo ESCAPED') != 0: raise OSError('no shell')", _ERROR),
    Escape("multiprocessing", "import multiprocessing\n"
           "multiprocessing.get_context('fork').Process(target=print).start()\n"
           "print('ESCAPED')", _ERROR),
)  # fmt: skip

_RIGHTS = (
    Escape("becoming root", "import os\nif os.getuid() == 0: os.chown('.', 1, 1)\nos.setuid(0)\n"
           "os.chown('.', 1, 1)\nprint('ESCAPED')", _ERROR),
    Escape("raising its limits", "import resource\nsoft, hard = resource.getrlimit(resource.RLIMIT_AS)\n"
           "resource.setrlimit(resource.RLIMIT_AS, (hard * 4, hard * 4))\nprint('ESCAPED')", _ERROR),
    Escape("new namespaces", f"{_LIBC}if libc.unshare(0x10000000) == 0: print('ESCAPED')\n"
           "else: raise OSError(ctypes.get_errno(), 'unshare')", _ERROR),
    Escape("a mount", f"{_LIBC}if libc.mount(b'none', b'.', b'tmpfs', 0, None) == 0: print('ESCAPED')\n"
           "else: raise OSError(ctypes.get_errno(), 'mount')", _ERROR),
    Escape("surviving its parent", f"{_LIBC}if libc.prctl(1, 0, 0, 0, 0) == 0: print('ESCAPED')\n"
           "else: raise OSError(ctypes.get_errno(), 'prctl')", _ERROR),
    Escape("memory that no limit counts", f"{_LIBC}if libc.memfd_create(b'x', 0) >= 0: print('ESCAPED')\n"
           "else: raise OSError(ctypes.get_errno(), 'memfd_create')", _ERROR),
    Escape("System V shared memory", f"{_LIBC}if libc.shmget(0, 4096, 0o1600) >= 0: print('ESCAPED')\n"
           "else: raise OSError(ctypes.get_errno(), 'shmget')", _ERROR),
    Escape("io_uring", f"{_LIBC}if libc.syscall(425, 4, ctypes.create_string_buffer(256)) >= 0: print('ESCAPED')\n"
           "else: raise OSError(ctypes.get_errno(), 'io_uring_setup')", _ERROR),
)  # fmt: skip

_RESOURCES = (
    Escape("a memory bomb", "parts = []\nwhile True: parts.append(bytes(50 << 20))", ("memory", "timeout")),
    Escape("a memory bomb by numpy", "import numpy\nnumpy.ones(10**11)", ("memory", "error")),
    Escape("spinning", "while True: pass", _TIMEOUT),
    Escape("spinning in C", "x = 7 ** (10 ** 9)", ("timeout", "memory")),
    Escape("sleeping forever", "import time\ntime.sleep(10 ** 6)", _TIMEOUT),
    Escape("waiting for input", "input()", _ERROR),
    Escape("a thread that does not end", "import threading, time\n"
           "threading.Thread(target=time.sleep, args=(60,)).start()",
           ("timeout", "error")),
    Escape("stopping itself", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", _TIMEOUT),
    Escape("ignoring signals", "import signal\n"
           "for s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\n"
           "while True: pass", _TIMEOUT),
    Escape("catching everything", "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
           _TIMEOUT),
    Escape("a flood on stdout", "while True: print('x' * 1000)", ("output",)),
    Escape("a flood on stderr", "import sys\nwhile True: print('x' * 1000, file=sys.stderr)", ("output",)),
    Escape("a flood past sys.stdout", "import os\nwhile True: os.write(1, bytes(10 ** 6))", ("output",)),
    Escape("a flood in its last words", "raise ValueError('x' * 10 ** 6)", _ERROR),
    Escape("a list without end", "import itertools\nlist(itertools.count(10 ** 9))", ("memory", "timeout")),
    Escape("deep recursion", "def f(): f()\nf()", _ERROR),
    Escape("recursion without a limit", "import sys\nsys.setrecursionlimit(10 ** 9)\nf = lambda: f()\nf()",
           ("killed", "memory", "timeout", "error")),
    Escape("an integer too long to print", "print(10 ** 5000)", _ERROR),
    Escape("nested code", "eval('(' * 10 ** 5)", ("error", "memory", "killed")),
)  # fmt: skip

_FORGERY = (
    Escape("forged messages", "import json, os\n"
           "message = json.dumps({'kind': 'done', 'status': 0, 'cpu_seconds': 0}).encode().ljust(1024)\n"
           "for fd in range(3, 256):\n    try: os.write(fd, message)\n    except OSError: continue\n"
           "    print('ESCAPED', fd)\nraise OSError('no descriptor')", _ERROR),
    Escape("a pickle on every descriptor", "import os, pickle\nclass Bomb:\n"
           "    def __reduce__(self): return (open, (<FOLDER> + '/new', 'w'))\n"
           "for fd in range(1, 256):\n    try: os.write(fd, pickle.dumps(Bomb()))\n    except OSError: pass", ("ok",)),
    Escape("closing every descriptor", "import os\nos.closerange(0, 256)\nwhile True: pass", _TIMEOUT),
    Escape("an exit that skips the end", "import os\nos._exit(0)", ("ok",)),
    Escape("an exit status", "import os\nos._exit(3)", _ERROR),
    Escape("killing itself", "import os\nos.kill(os.getpid(), 9)", ("killed",)),
    Escape("a crash", "import ctypes\nctypes.string_at(0)", ("killed",)),
    Escape("aborting", "import os\nos.abort()", ("killed",)),
    Escape("changed builtins", "import builtins, sys\nbuiltins.print = lambda *a, **k: None\n"
           "sys.modules['math'] = None",
           ("ok",), after="import math\nprint(math.isqrt(1))"),
    Escape("changed exits", "import os\nos._exit = lambda status: None\nraise ValueError", ("ok", "error", "timeout")),
    Escape("the frames of its caller", "import sys\nframe = sys._getframe()\n"
           "while frame.f_back:\n    frame = frame.f_back\n    for value in list(frame.f_locals.values()):\n"
           "        if hasattr(value, 'sendall'):\n            value.sendall(b'x' * 1024)\n"
           "            print('ESCAPED')\n"
           "raise OSError('nothing there')", _ERROR),
)  # fmt: skip

ESCAPES = (*_SECRETS, *_FILES, *_NETWORK, *_PROCESSES, *_RIGHTS, *_RESOURCES, *_FORGERY)
