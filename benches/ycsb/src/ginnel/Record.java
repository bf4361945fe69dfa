package ginnel;

import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.util.Map;
import java.util.Set;
import site.ycsb.ByteArrayByteIterator;
import site.ycsb.ByteIterator;

/** A record as one value: for each field, the lengths of its name and of its bytes, followed by both. */
final class Record {
  private Record() {}

  static byte[] pack(Map<String, ByteIterator> fields) {
    ByteArrayOutputStream value = new ByteArrayOutputStream(1200);
    for (Map.Entry<String, ByteIterator> field : fields.entrySet()) {
      byte[] name = field.getKey().getBytes();
      byte[] bytes = field.getValue().toArray();
      value.write(name.length);
      value.writeBytes(ByteBuffer.allocate(4).putInt(bytes.length).array());
      value.writeBytes(name);
      value.writeBytes(bytes);
    }
    return value.toByteArray();
  }

  /** Returns the wanted fields, or all fields if none is named. */
  static void unpack(byte[] value, Set<String> wanted, Map<String, ByteIterator> fields) {
    ByteBuffer rest = ByteBuffer.wrap(value);
    while (rest.hasRemaining()) {
      byte[] name = new byte[rest.get()];
      int len = rest.getInt();
      rest.get(name);
      String field = new String(name);
      if (wanted == null || wanted.contains(field)) {
        fields.put(field, new ByteArrayByteIterator(value, rest.position(), len));
      }
      rest.position(rest.position() + len);
    }
  }
}
