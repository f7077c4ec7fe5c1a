"""Types of loaders, with torch's own annotations: those of torch's loader."""

from __future__ import annotations

from torch.utils.data import Dataset
from typing_extensions import assert_type

from xpool.data import DataLoader


class Numbers(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 3


assert_type(DataLoader(Numbers()), DataLoader[int])
assert_type(DataLoader(["a", "b"], batch_size=2, shuffle=True), DataLoader[str])
assert_type(DataLoader(Numbers(), num_workers="auto"), DataLoader[int])
for batch in DataLoader(Numbers(), num_workers=2):
    print(batch)
