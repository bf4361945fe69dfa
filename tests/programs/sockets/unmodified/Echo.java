// A server with one selector, and clients with a thread for each connection, over channels and over streams. Its arguments are
// "serve" or "talk", and the server's address and port.

import java.io.DataInputStream;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.nio.ByteBuffer;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;

class Echo {
    static final int CLIENTS = 8;

    public static void main(String[] arguments) throws Exception {
        InetSocketAddress at = new InetSocketAddress(arguments[1], Integer.parseInt(arguments[2]));
        if (arguments[0].equals("serve")) serve(at); else talk(at);
    }

    static void serve(InetSocketAddress at) throws Exception {
        Selector selector = Selector.open();
        ServerSocketChannel listener = ServerSocketChannel.open();
        listener.bind(at);
        listener.configureBlocking(false);
        listener.register(selector, SelectionKey.OP_ACCEPT);
        while (true) {
            selector.select();
            for (SelectionKey key : selector.selectedKeys()) {
                if (key.isAcceptable()) {
                    SocketChannel channel = listener.accept();
                    if (channel == null) continue;
                    channel.configureBlocking(false);
                    channel.register(selector, SelectionKey.OP_READ, ByteBuffer.allocateDirect(65536));
                } else {
                    echo(key);
                }
            }
            selector.selectedKeys().clear();
        }
    }

    // Sends back the received bytes. Bytes that cannot be sent now are sent before more are received.
    static void echo(SelectionKey key) throws Exception {
        SocketChannel channel = (SocketChannel) key.channel();
        ByteBuffer buffer = (ByteBuffer) key.attachment();
        if (key.isReadable() && channel.read(buffer) < 0) {
            channel.close();
            return;
        }
        buffer.flip();
        channel.write(buffer);
        key.interestOps(buffer.hasRemaining() ? SelectionKey.OP_WRITE : SelectionKey.OP_READ);
        buffer.compact();
    }

    interface Exchange {
        byte[] send(byte[] bytes) throws Exception;
    }

    static void talk(InetSocketAddress at) throws Exception {
        List<Thread> threads = new ArrayList<>();
        List<Throwable> failures = new ArrayList<>();
        for (int i = 0; i < CLIENTS; i++) {
            int number = i;
            Thread thread = new Thread(() -> {
                try {
                    if (number % 2 == 0) channel(at, number); else stream(at, number);
                } catch (Throwable failure) {
                    synchronized (failures) { failures.add(failure); }
                }
            });
            threads.add(thread);
            thread.start();
        }
        for (Thread thread : threads) thread.join();
        for (Throwable failure : failures) failure.printStackTrace();
        System.exit(failures.isEmpty() ? 0 : 1);
    }

    static void channel(InetSocketAddress at, int seed) throws Exception {
        try (SocketChannel channel = SocketChannel.open(at)) {
            turns(seed, bytes -> {
                ByteBuffer out = ByteBuffer.wrap(bytes), in = ByteBuffer.allocate(bytes.length);
                while (out.hasRemaining()) channel.write(out);
                while (in.hasRemaining()) {
                    if (channel.read(in) < 0) throw new Exception("the end came too early");
                }
                return in.array();
            });
            channel.shutdownOutput();
            if (channel.read(ByteBuffer.allocate(1)) != -1) throw new Exception("there is no end");
        }
    }

    static void stream(InetSocketAddress at, int seed) throws Exception {
        try (Socket socket = new Socket(at.getAddress(), at.getPort())) {
            socket.setTcpNoDelay(true);
            socket.setSoTimeout(60_000);
            DataInputStream input = new DataInputStream(socket.getInputStream());
            turns(seed, bytes -> {
                socket.getOutputStream().write(bytes);
                byte[] back = new byte[bytes.length];
                input.readFully(back);
                return back;
            });
            socket.shutdownOutput();
            if (input.read() != -1) throw new Exception("there is no end");
        }
    }

    // Calls exchange until all connections have changed over, and for some time afterwards.
    static void turns(int seed, Exchange exchange) throws Exception {
        Random random = new Random(seed);
        int after = 0;
        for (int turn = 0; after < 100; turn++) {
            byte[] bytes = new byte[turn % 20 == 0 ? 50_000 : 1 + random.nextInt(3_000)];
            random.nextBytes(bytes);
            if (!Arrays.equals(exchange.send(bytes), bytes)) throw new Exception("other bytes in turn " + turn);
            if (after > 0 || (turn % 20 == 0 && allHaveChanged())) after++;
        }
    }

    static boolean allHaveChanged() throws Exception {
        String own = "\"pid\":" + ProcessHandle.current().pid() + ",";
        return Files.readAllLines(Path.of(System.getenv("GINNEL_SOCKETS_REPORT"))).stream()
            .filter(line -> line.contains(own) && line.contains("\"sent_after_us\"") && line.contains("\"received_after_us\""))
            .map(line -> line.replaceFirst(".*\"connection\":(\\d+).*", "$1"))
            .distinct()
            .count() >= CLIENTS;
    }
}
