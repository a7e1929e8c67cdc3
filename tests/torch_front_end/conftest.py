from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _same_numbers_every_run():
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items):
    # Torch warns about itself.
    for item in items:
        if "torch_front_end" in str(item.path):
            item.add_marker(
                pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"), append=False
            )
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning:torch"), append=False)
