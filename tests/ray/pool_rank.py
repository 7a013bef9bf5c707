# SPDX-License-Identifier: Apache-2.0
"""A rank: a process that reads commands, one a line, and answers each with a line.

open    make a loader and begin to iterate it, from a state if one is given
take    so many batches, or all that are left
state   the loader's state
failed  indices of the bad samples
close   end the iterator
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys

from tests.ray.pool_data import loader_of, told


class Server:
    def open(self, rank, world_size, state=None, **options):
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
        self.loader = loader_of(rank=rank, world_size=world_size, **options)
        if state is not None:
            self.loader.load_state_dict(pickle.loads(base64.b64decode(state)))
        self.iterator = iter(self.loader)

    def take(self, count=None):
        taken = []
        while count is None or len(taken) < count:
            try:
                taken.append(told(next(self.iterator)))
            except StopIteration:
                break
        return taken

    def state(self):
        return base64.b64encode(pickle.dumps(self.loader.state_dict())).decode()

    def failed(self):
        return [failure.index for failure in self.loader.failures]

    def close(self):
        self.iterator = self.loader = None


def main():
    import ray

    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    server = Server()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    print(json.dumps(["ready", None]), file=answers, flush=True)
    for line in sys.stdin:
        name, options = json.loads(line)
        try:
            answer = ["done", getattr(server, name)(**options)]
        except Exception as error:
            answer = ["raised", f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
