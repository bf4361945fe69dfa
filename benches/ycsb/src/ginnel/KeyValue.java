package ginnel;

import java.util.HashMap;
import java.util.Map;
import java.util.Set;
import java.util.Vector;
import site.ycsb.ByteIterator;
import site.ycsb.DB;
import site.ycsb.DBException;
import site.ycsb.Status;

/** Implements YCSB's operations by those of a cache. Each thread of YCSB has its own instance. */
abstract class KeyValue extends DB {
  /** Returns the value, or null if there is none. */
  abstract byte[] get(String key) throws Exception;

  abstract void set(String key, byte[] value) throws Exception;

  abstract boolean remove(String key) throws Exception;

  abstract void open() throws Exception;

  @Override
  public void init() throws DBException {
    try {
      open();
    } catch (Exception error) {
      throw new DBException(error);
    }
  }

  @Override
  public Status read(String table, String key, Set<String> fields, Map<String, ByteIterator> result) {
    try {
      byte[] value = get(key);
      if (value == null) {
        return Status.NOT_FOUND;
      }
      Record.unpack(value, fields, result);
      return Status.OK;
    } catch (Exception error) {
      return failed(error);
    }
  }

  @Override
  public Status insert(String table, String key, Map<String, ByteIterator> values) {
    return update(table, key, values);
  }

  @Override
  public Status update(String table, String key, Map<String, ByteIterator> values) {
    try {
      set(key, Record.pack(values));
      return Status.OK;
    } catch (Exception error) {
      return failed(error);
    }
  }

  @Override
  public Status delete(String table, String key) {
    try {
      return remove(key) ? Status.OK : Status.NOT_FOUND;
    } catch (Exception error) {
      return failed(error);
    }
  }

  @Override
  public Status scan(
      String table, String start, int count, Set<String> fields, Vector<HashMap<String, ByteIterator>> result) {
    return Status.NOT_IMPLEMENTED;
  }

  private static Status failed(Exception error) {
    System.err.println(error);
    return Status.ERROR;
  }
}
