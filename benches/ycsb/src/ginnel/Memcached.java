package ginnel;

import java.util.concurrent.TimeUnit;
import net.spy.memcached.AddrUtil;
import net.spy.memcached.CachedData;
import net.spy.memcached.MemcachedClient;
import net.spy.memcached.transcoders.Transcoder;

/** Any memcached server, at the property `memcached.hosts` (ADDRESS:PORT), through spymemcached. */
public final class Memcached extends KeyValue {
  private MemcachedClient client;

  @Override
  void open() throws Exception {
    String hosts = getProperties().getProperty("memcached.hosts", "127.0.0.1:11211");
    client = new MemcachedClient(AddrUtil.getAddresses(hosts));
  }

  @Override
  byte[] get(String key) throws Exception {
    return client.asyncGet(key, Bytes.INSTANCE).get(10, TimeUnit.SECONDS);
  }

  @Override
  void set(String key, byte[] value) throws Exception {
    if (!client.set(key, 0, value, Bytes.INSTANCE).get(10, TimeUnit.SECONDS)) {
      throw new IllegalStateException("an item was not stored");
    }
  }

  @Override
  boolean remove(String key) throws Exception {
    return client.delete(key).get(10, TimeUnit.SECONDS);
  }

  @Override
  public void cleanup() {
    client.shutdown(10, TimeUnit.SECONDS);
  }

  /** Passes values on without encoding them. */
  private enum Bytes implements Transcoder<byte[]> {
    INSTANCE;

    @Override
    public boolean asyncDecode(CachedData data) {
      return false;
    }

    @Override
    public CachedData encode(byte[] value) {
      return new CachedData(0, value, getMaxSize());
    }

    @Override
    public byte[] decode(CachedData data) {
      return data.getData();
    }

    @Override
    public int getMaxSize() {
      return CachedData.MAX_SIZE;
    }
  }
}
