"""The texts of the programs.  Rows fill in the fields in braces."""

from __future__ import annotations

TASKS = """
    def square(x):
        return x * x
"""
DATA_TASKS = """
    def record(r):
        return {**r, "total": sum(r["values"])}
    def shout(text):
        return text.upper()
    def size(a):
        return a.nbytes
    def make(n):
        import numpy
        return numpy.ones(n // 8)
    def twice(a):
        return a * 2
    def add(a, b):
        return a + b
"""
LARGE_TOP = 'DATA = b"x" * (150 << 20)\n'

WHOLE = """
    if __name__ == "__main__":
        pool = start(2)
        assert list(run(pool, square, range(9))) == [x * x for x in range(9)]
        finish(pool)
"""

FIRST = """
    if __name__ == "__main__":
        begin = time.perf_counter()
        pool = start(2)
        run(pool, square, [1])
        tell(time.perf_counter() - begin)
        finish(pool)
"""

PRELOADED = """
    if __name__ == "__main__":
        preload = getattr(sys.modules.get("xpool"), "preload", None)
        if preload is not None:
            preload("torch")
        begin = time.perf_counter()
        import torch
        time.sleep(time.perf_counter() - begin)  # the program's other work
        begin = time.perf_counter()
        pool = start(2)
        run(pool, square, [1])
        tell(time.perf_counter() - begin)
        finish(pool)
"""

SECOND = """
    if __name__ == "__main__":
        pool = start(2)
        run(pool, square, range(9))
        finish(pool)
        begin = time.perf_counter()
        pool = start(2)
        run(pool, square, [1])
        tell(time.perf_counter() - begin)
        finish(pool)
"""

REPLACED = """
    if __name__ == "__main__":
        pool = start(2, maxtasksperchild=1)
        run(pool, square, range(4))
        begin = time.perf_counter()
        run(pool, square, range(30))
        tell((time.perf_counter() - begin) / 30)
        finish(pool)
"""

RELOADED = """
    def total(x):
        return len(data) + x
    if __name__ == "__main__":
        begin = time.perf_counter()
        pool = start(2, maxtasksperchild=1)
        assert list(run(pool, total, range(4))) == [1000, 1001, 1002, 1003]
        tell(time.perf_counter() - begin)
        finish(pool)
"""

TEN = """
    if __name__ == "__main__":
        begin = time.perf_counter()
        for _ in range(5):
            pool = start(2)
            run(pool, square, range(10))
            finish(pool)
        tell((time.perf_counter() - begin) / 5)
"""

MANY = """
    if __name__ == "__main__":
        begin = time.perf_counter()
        with start(32) as pool:
            assert len(list(run(pool, square, range(320)))) == 320
        tell(time.perf_counter() - begin)
"""


DATA = """
    if __name__ == "__main__":
        import numpy
        pool = start(2)
        run(pool, square, range(9))
        items = {items}
        {how}(pool, {func}, items[:8])
        begin = time.perf_counter()
        got = {how}(pool, {func}, items)
        tell(time.perf_counter() - begin)
        assert len(list(got)) == len(items)
        finish(pool)
"""

CALLBACKS = """
    if __name__ == "__main__":
        pool = start(2)
        run(pool, square, range(9))
        got = []
        begin = time.perf_counter()
        notify(pool, square, range(2000), got.append)
        while len(got) < 2000:
            time.sleep(0.0001)
        tell(time.perf_counter() - begin)
        finish(pool)
"""

COMPUTED = """
    def compute(x):
        for n in range(100_000):
            x += n
        return x
    if __name__ == "__main__":
        pool = start(2)
        run(pool, square, range(9))
        begin = time.perf_counter()
        got = list(run(pool, compute, range(40)))
        tell(time.perf_counter() - begin)
        assert len(got) == 40
        finish(pool)
"""

BUSY = """
    def nap(x):
        time.sleep(0.005)
        return x
    if __name__ == "__main__":
        import threading
        pool = start(2)
        run(pool, nap, range(9))
        over = []
        def compute():
            n = 0
            while not over:
                n += 1
        thread = threading.Thread(target=compute)
        thread.start()
        begin = time.perf_counter()
        got = list(run(pool, nap, range(200)))
        seconds = time.perf_counter() - begin
        over.append(True)
        thread.join()
        tell(seconds)
        assert len(got) == 200
        finish(pool)
"""

TESTED = """
    import pytest
    class TestWithPools:
        @pytest.mark.parametrize("n", range(5))
        def test_squares(self, n):
            pool = start(2)
            try:
                assert list(run(pool, square, range(n, n + 3))) == [x * x for x in range(n, n + 3)]
            finally:
                finish(pool)
    class Clock:
        def pytest_runtest_setup(self, item):
            self.begin = getattr(self, "begin", None) or time.perf_counter()
        def pytest_runtest_teardown(self, item):
            self.end = time.perf_counter()
    if __name__ == "__main__":
        clock = Clock()
        options = [__file__, "-q", "-s", "--no-header", "-p", "no:cacheprovider", "-c", "/dev/null"]
        assert pytest.main(options, plugins=[clock]) == 0
        tell((clock.end - clock.begin) / 5)
"""

STREAMED_THROUGH = """
    if __name__ == "__main__":
        pool = start(2)
        run(pool, square, range(9))
        begin = time.perf_counter()
        for _ in range({times}):
            assert sum(1 for _ in stream(pool, square, range({n}), 1)) == {n}
        tell(time.perf_counter() - begin)
        finish(pool)
"""

ONE_BY_ONE = """
    if __name__ == "__main__":
        pool = start(2)
        one = getattr(pool, "apply", None) or (lambda f, args: pool.submit(f, *args).result())
        one(square, (1,))
        begin = time.perf_counter()
        for n in range(1000):
            one(square, (n,))
        tell(time.perf_counter() - begin)
        finish(pool)
"""

SHARED = """
    def first(t):
        return int(t[0])
    if __name__ == "__main__":
        t = torch.arange(1 << 20).share_memory_()
        pool = start(2, **({"is_copy_tensor": False} if "xpool" in sys.modules else {}))
        one = getattr(pool, "apply", None) or (lambda f, args: pool.submit(f, *args).result())
        for n in range(20):
            one(first, (t,))
        begin = time.perf_counter()
        for n in range(300):
            one(first, (t,))
        tell((time.perf_counter() - begin) / 300)
        finish(pool)
"""

ARRAYS_STREAMED = """
    if __name__ == "__main__":
        import numpy
        pool = start(2)
        assert sum(a.nbytes for a in stream(pool, make, [1 << 20] * 300, 1)) == 300 << 20
        begin = time.perf_counter()
        for _ in range(3):
            assert sum(a.nbytes for a in stream(pool, make, [1 << 20] * 300, 1)) == 300 << 20
        tell((time.perf_counter() - begin) / 3)
        finish(pool)
"""

MEMORY = """
    def field(name, pid="self"):
        with open(f"/proc/{{pid}}/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))
    def small(x):
        return x & 127
    def peak(x):
        time.sleep(0.02)  # so that each worker gets some of these tasks
        return field("VmHWM")
    if __name__ == "__main__":
        pool = start(2)
        spread(pool, small, range(1000))
        worker = max(run(pool, peak, range(16)))
        before = field("VmRSS")
        n = {n}
        {work}
        tell((({what}) / n) / 1e3)
        finish(pool)
"""
MAPPED = "got = spread(pool, small, range(n)); assert len(got) == n"
STREAMED = "assert sum(1 for _ in stream(pool, small, iter(range(n)), 100)) == n"
OF_PARENT = 'max(0, field("VmHWM") - before)'
OF_WORKER = "max(run(pool, peak, range(16))) - worker"

IMAGES = """
    import io
    import numpy
    import torch
    from PIL import Image
    from torch.utils.data import Dataset
    class Photos(Dataset):
        def __init__(self):
            from sklearn.datasets import load_sample_images
            self.files = []
            for image in load_sample_images().images:
                file = io.BytesIO()
                Image.fromarray(image).save(file, "jpeg")
                self.files.append(file.getvalue())
        def __len__(self):
            return 192
        def __getitem__(self, i):
            image = Image.open(io.BytesIO(self.files[i % len(self.files)])).convert("RGB")
            image = image.resize((224, 224))
            array = numpy.asarray(image, dtype="float32").transpose(2, 0, 1) / 255
            return torch.from_numpy(array), i
    if __name__ == "__main__":
        torch.set_num_threads(1)
        loader = DataLoader(Photos(), batch_size=16, num_workers=2)
        begin = time.perf_counter()
        assert sum(len(images) for images, _ in loader) == 192
        tell(time.perf_counter() - begin)
"""

SEARCH = """
    if __name__ == "__main__":
        import joblib
        {importing}
        from sklearn.datasets import load_digits
        from sklearn.model_selection import GridSearchCV
        from sklearn.tree import DecisionTreeClassifier
        x, y = load_digits(return_X_y=True)
        search = GridSearchCV(
            DecisionTreeClassifier(random_state=0),
            {{"max_depth": [4, 8, 12], "min_samples_leaf": [1, 2, 4, 8]}}, cv=5,
        )
        begin = time.perf_counter()
        with joblib.parallel_config({backend!r}, n_jobs=2):
            search.fit(x, y)
        tell(time.perf_counter() - begin)
"""


JOBS = """
    def nap(x):
        time.sleep(0.001)
        return x
    if __name__ == "__main__":
        import joblib
        {importing}
        with joblib.parallel_config({backend!r}, n_jobs=2):
            joblib.Parallel()(joblib.delayed(nap)(x) for x in range(100))
            begin = time.perf_counter()
            got = joblib.Parallel()(joblib.delayed(nap)(x) for x in range(10_000))
            tell(time.perf_counter() - begin)
        assert got == list(range(10_000))
"""

IMPORT_TORCH = "import torch\n"
SET_TORCH = """\
import torch
torch.set_default_dtype(torch.float64)
torch.backends.cudnn.benchmark = True
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""
LOADING_TOP = """\
def load():
    time.sleep(2)
    return list(range(1000))
data = load()
"""
PANDAS_TOP = "import pandas\n"
LISTS_TOP = "rows = [[i, i + 1, i + 2, i + 3] for i in range(700_000)]\n"
RECORDS = '[{"id": i, "name": f"name {i}", "values": [i, i + 1.5]} for i in range(20_000)]'
STRINGS = '[f"line {i} of a text" for i in range(50_000)]'
