# dask.distributed: a scheduler, two workers and a client. One task after another, many at once, and large results.
import time

from distributed import Client, LocalCluster


def increment(x):
    return x + 1


def large(x):
    return bytes(1000000)


def main():
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, protocol='tcp://', dashboard_address=None) as cluster, \
            Client(cluster) as client:
        client.gather(client.map(increment, range(50), pure=False))
        begun = time.monotonic()
        for i in range(100):
            assert client.submit(increment, i, pure=False).result() == i + 1
        assert sum(client.gather(client.map(increment, range(500), pure=False))) == 125250
        assert sum(map(len, client.gather(client.map(large, range(50), pure=False)))) == 50000000
        took = time.monotonic() - begun
    print('took', took)


if __name__ == '__main__':
    main()
