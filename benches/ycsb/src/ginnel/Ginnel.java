package ginnel;

/** A cache of Ginnel, at the property `ginnel.cache` (SEGMENT/NAME), through the C library. */
public final class Ginnel extends KeyValue {
  static {
    System.loadLibrary("ginnel_ycsb");
  }

  private long cache;

  @Override
  void open() throws Exception {
    cache = open(getProperties().getProperty("ginnel.cache", "items/main").getBytes());
  }

  @Override
  byte[] get(String key) throws Exception {
    return get(cache, key.getBytes());
  }

  @Override
  void set(String key, byte[] value) throws Exception {
    set(cache, key.getBytes(), value);
  }

  @Override
  boolean remove(String key) throws Exception {
    return delete(cache, key.getBytes());
  }

  @Override
  public void cleanup() {
    close(cache);
  }

  private static native long open(byte[] address) throws Exception;

  private static native void close(long cache);

  private static native byte[] get(long cache, byte[] key) throws Exception;

  private static native void set(long cache, byte[] key, byte[] value) throws Exception;

  private static native boolean delete(long cache, byte[] key) throws Exception;
}
