"""What every store of the API's records must do. Backends subclass ObjectsContract and give it an `objects` fixture."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from service.objects.base import ObjectChanged, ObjectExists, Objects, StoredObject, UnknownObject


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class ObjectsContract:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    def test_create_and_get(self, objects: Objects, clock: Clock) -> None:
        data = {"text": "naïve ☃", "nested": {"list": [1, None]}, "none": None}
        made = objects.create("batch", "t", "batch-1", data, due_at=clock.now + 5.5)
        assert made == StoredObject("batch", "t", "batch-1", data, 1, clock.now, clock.now + 5.5)
        assert objects.get("batch", "t", "batch-1") == made
        with pytest.raises(ObjectExists):
            objects.create("batch", "t", "batch-1", {})
        assert objects.get("batch", "t", "batch-1").data == data

    def test_objects_are_their_tenants_and_kinds(self, objects: Objects) -> None:
        objects.create("batch", "t", "x", {})
        for kind, tenant in (("batch", "u"), ("upload", "t")):
            with pytest.raises(UnknownObject):
                objects.get(kind, tenant, "x")
            assert objects.find(kind, tenant, limit=9) == []
            objects.create(kind, tenant, "x", {"of": tenant})
        assert objects.get("batch", "u", "x").data == {"of": "u"}

    def test_replace_goes_by_version(self, objects: Objects) -> None:
        first = objects.create("upload", "t", "x", {"n": 1}, due_at=1.0)
        second = objects.replace(first, {"n": 2}, due_at=None)
        assert (second.version, second.due_at, second.created_at) == (2, None, first.created_at)
        assert objects.get("upload", "t", "x") == second
        with pytest.raises(ObjectChanged):
            objects.replace(first, {"n": 3}, due_at=None)
        objects.delete("upload", "t", "x")
        objects.delete("upload", "t", "x")
        with pytest.raises(ObjectChanged):
            objects.replace(second, {"n": 3}, due_at=None)
        with pytest.raises(UnknownObject):
            objects.get("upload", "t", "x")

    def test_find_pages_by_creation(self, objects: Objects, clock: Clock) -> None:
        for name in ("a", "c", "b", "d"):
            objects.create("batch", "t", name, {})
            clock.now += name != "c"  # c and b are of one time
        found = [item.id for item in objects.find("batch", "t", limit=9, order="asc")]
        assert found == ["a", "b", "c", "d"]
        assert [item.id for item in objects.find("batch", "t", limit=2)] == ["d", "c"]
        assert [item.id for item in objects.find("batch", "t", limit=9, after="c")] == ["b", "a"]
        assert [item.id for item in objects.find("batch", "t", limit=1, after="b", order="asc")] == ["c"]
        with pytest.raises(UnknownObject):
            objects.find("batch", "t", limit=9, after="none")

    def test_what_is_due_is_claimed_once(self, objects: Objects, clock: Clock) -> None:
        for number in (3, 1, 2):
            objects.create("delivery", f"tenant {number}", f"x{number}", {"n": number}, due_at=clock.now + number)
        objects.create("delivery", "t", "never", {})
        assert objects.claim_due("delivery", lease_s=10, limit=9) == []
        assert objects.count_due("delivery") == 3
        clock.now += 3
        first, second = objects.claim_due("delivery", lease_s=10, limit=2)
        assert [(item.id, item.tenant, item.data["n"]) for item in (first, second)] == [
            ("x1", "tenant 1", 1),
            ("x2", "tenant 2", 2),
        ]
        assert first.due_at == clock.now + 10
        assert [item.id for item in objects.claim_due("delivery", lease_s=10, limit=9)] == ["x3"]
        assert objects.claim_due("delivery", lease_s=10, limit=9) == []
        objects.replace(second, second.data, due_at=None)
        objects.delete("delivery", "tenant 3", "x3")
        assert objects.count_due("delivery") == 1
        clock.now += 11
        (again,) = objects.claim_due("delivery", lease_s=10, limit=9)
        assert again.id == "x1"
        with pytest.raises(ObjectChanged):
            objects.replace(first, {"late": True}, due_at=None)
        objects.replace(again, {"done": True}, due_at=None)

    def test_claims_at_once_never_give_one_object_twice(self, objects: Objects, clock: Clock) -> None:
        for number in range(40):
            objects.create("watch", "t", f"x{number}", {}, due_at=clock.now)
        with ThreadPoolExecutor(4) as threads:
            rounds = threads.map(lambda _: objects.claim_due("watch", lease_s=10, limit=5), range(12))
        ids = [item.id for claimed in rounds for item in claimed]
        assert sorted(ids) == sorted(f"x{number}" for number in range(40))
