"""One copy there, one copy back."""

import torch

from server.worker.flight import Flights
from tests.fakes.worker_state import flight_on


def test_what_is_put_arrives_with_its_type(device_name: str) -> None:
    flight = flight_on(device_name)
    ids = flight.put([1, 2**63 - 1, -3])
    narrow = flight.put(range(5), torch.int32)
    floats = flight.put((0.5, 1e38), torch.float32)
    empty = flight.put([])
    flight.send()
    assert ids.tolist() == [1, 2**63 - 1, -3]
    assert narrow.tolist() == [0, 1, 2, 3, 4]
    assert floats.tolist() == [0.5, torch.tensor(1e38).item()]
    assert empty.tolist() == []
    assert all(tensor.data_ptr() % 16 == 0 for tensor in (ids, narrow, floats))


def test_what_does_not_fit_arrives_all_the_same(device_name: str) -> None:
    flight = flight_on(device_name, nbytes=64)
    tensors = [flight.put(range(i, i + 5)) for i in range(4)]
    tensors.append(flight.put(range(100)))
    tensors.append(flight.put([7], torch.int32))
    flight.send()
    assert [tensor.tolist() for tensor in tensors] == [*([*range(i, i + 5)] for i in range(4)), [*range(100)], [7]]


def test_flights_are_used_again_and_lead_to_the_same_place(device_name: str) -> None:
    flights = Flights(torch.device(device_name), 4096, 4)
    first = flights.begin()
    place = first.put([1, 2]).data_ptr()
    second = flights.begin()
    assert second is not first
    flights.give_back(first)
    again = flights.begin()
    assert again is first
    assert again.put([3, 4]).data_ptr() == place


def test_results_come_back_however_many_they_are(device_name: str) -> None:
    flight = flight_on(device_name)
    for count in (3, 1000, 0):
        flight.bring_back(torch.arange(count, device=device_name))
        assert flight.results().tolist() == list(range(count))
