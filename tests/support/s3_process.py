"""The program of ``s3_server``: moto's S3 on a free port of this machine.

It prints its port, and obeys the lines ``stop`` and ``start`` on stdin. Stopped, it closes its socket and keeps its
objects.
"""

import sys
import threading

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


def main() -> None:
    port, server, application = 0, None, DomainDispatcherApplication(create_backend_app)
    line = "start\n"
    while line:
        if line == "start\n":
            # One request at a time: so a condition holds until its object is replaced, as at a real provider.
            server = make_server("127.0.0.1", port, application, threaded=False)
            port = server.server_port
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        elif server is not None:
            server.shutdown()
            server.server_close()
        print(port, flush=True)
        line = sys.stdin.readline()


if __name__ == "__main__":
    main()
