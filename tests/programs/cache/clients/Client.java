import java.net.InetSocketAddress;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicReference;
import net.spy.memcached.CASResponse;
import net.spy.memcached.CASValue;
import net.spy.memcached.ConnectionFactoryBuilder;
import net.spy.memcached.ConnectionFactoryBuilder.Protocol;
import net.spy.memcached.MemcachedClient;

/** A client in Java: spymemcached, in both protocols. Arguments: HOST PORT. */
public final class Client {
    private static void check(boolean isRight, String what) {
        if (!isRight) {
            throw new AssertionError(what);
        }
    }

    private static void all(MemcachedClient client) throws Exception {
        check(client.flush().get(), "flush");
        check(client.get("java:none") == null, "a miss");
        for (int i = 0; i < 200; i++) {
            String value = String.valueOf(i).repeat(i + 1);
            check(client.set("java:" + i, 100, value).get(), "set");
            check(value.equals(client.get("java:" + i)), "get");
        }
        List<String> keys = new ArrayList<>();
        for (int i = 0; i < 300; i++) {
            keys.add("java:" + i);
        }
        Map<String, Object> found = client.getBulk(keys);
        check(found.size() == 200, "found " + found.size());
        check(!client.add("java:1", 0, "x").get(), "add");
        check(!client.replace("java:none", 0, "x").get(), "replace");
        check(client.append("java:1", "!").get() && client.prepend("java:1", "?").get(), "append");
        check("?11!".equals(client.get("java:1")), "appended");
        CASValue<Object> item = client.gets("java:1");
        check(client.cas("java:1", item.getCas(), "new") == CASResponse.OK, "cas");
        check(client.cas("java:1", item.getCas(), "newer") == CASResponse.EXISTS, "an old cas");
        check("new".equals(client.get("java:1")), "after cas");
        check(client.incr("java:count", 2, 40) == 40 && client.incr("java:count", 2, 40) == 42, "incr");
        check(client.decr("java:count", 50) == 0, "decr");
        check(client.touch("java:1", 100).get(), "touch");
        check(client.delete("java:1").get() && !client.delete("java:1").get(), "delete");
        check(client.get("java:1") == null, "deleted");
        byte[] large = new byte[900_000];
        check(client.set("java:large", 0, large).get(), "a large value");
        check(((byte[]) client.get("java:large")).length == large.length, "a large value read");

        // Several threads share the client's connection.
        AtomicReference<Throwable> failed = new AtomicReference<>();
        CountDownLatch left = new CountDownLatch(4);
        for (int t = 0; t < 4; t++) {
            String key = "java:thread" + t;
            new Thread(() -> {
                try {
                    for (int i = 0; i < 200; i++) {
                        check(client.set(key, 0, key + i).get(), "set by a thread");
                        check((key + i).equals(client.get(key)), "get by a thread");
                    }
                } catch (Throwable error) {
                    failed.set(error);
                }
                left.countDown();
            }).start();
        }
        left.await();
        check(failed.get() == null, String.valueOf(failed.get()));
        check(client.getStats().values().iterator().next().containsKey("curr_items"), "stats");
        check(client.getVersions().size() == 1, "version");
    }

    public static void main(String[] arguments) throws Exception {
        System.setProperty("net.spy.log.LoggerImpl", "net.spy.memcached.compat.log.SunLogger");
        java.util.logging.Logger.getLogger("net.spy").setLevel(java.util.logging.Level.WARNING);
        InetSocketAddress at = new InetSocketAddress(arguments[0], Integer.parseInt(arguments[1]));
        for (Protocol protocol : new Protocol[] {Protocol.TEXT, Protocol.BINARY}) {
            ConnectionFactoryBuilder builder = new ConnectionFactoryBuilder().setProtocol(protocol).setOpTimeout(20_000);
            MemcachedClient client = new MemcachedClient(builder.build(), Collections.singletonList(at));
            try {
                all(client);
            } finally {
                client.shutdown();
            }
        }
        System.out.println("all right");
    }
}
