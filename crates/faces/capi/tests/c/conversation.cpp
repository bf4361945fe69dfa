// Uses the library from C++: handles in unique_ptr, two threads, both kinds of channel.
#include <ginnel.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <unistd.h>
#include <vector>

template <auto function> struct Free {
    template <typename T> void operator()(T *handle) const { function(handle); }
};
using Endpoint = std::unique_ptr<ginnel_endpoint, Free<ginnel_detach>>;
using Listener = std::unique_ptr<ginnel_listener, Free<ginnel_listener_close>>;
using Channel = std::unique_ptr<ginnel_channel, Free<ginnel_channel_close>>;

template <typename T> T ok(T result)
{
    if (result < 0)
        throw std::runtime_error(std::string(ginnel_strerror(static_cast<int>(result))) + ": " + ginnel_last_error());
    return result;
}

static void check(bool condition, std::string_view what)
{
    if (!condition)
        throw std::runtime_error(std::string("not so: ").append(what));
}

static Listener listen(const Endpoint &endpoint, const char *name, ginnel_kind kind)
{
    ginnel_listener *listener;
    ok(ginnel_endpoint_listen(endpoint.get(), name, kind, nullptr, &listener));
    return Listener(listener);
}

static Channel accept(const Listener &listener)
{
    ginnel_channel *channel;
    ok(ginnel_accept(listener.get(), -1, &channel));
    return Channel(channel);
}

static Channel connect(const char *address, ginnel_kind kind)
{
    ginnel_channel *channel;
    ok(ginnel_connect(address, kind, nullptr, &channel));
    return Channel(channel);
}

static void messages(const Listener &listener)
{
    std::thread server([&] {
        Channel channel = accept(listener);
        const void *data;
        std::size_t len;
        while (ginnel_message_peek(channel.get(), &data, &len) == GINNEL_OK) {
            ok(ginnel_message_send(channel.get(), data, len));
            ok(ginnel_message_release(channel.get()));
        }
    });
    {
        Channel channel = connect("test/messages", GINNEL_MESSAGE);
        for (std::size_t len = 0; len < 3000; len += 7) {
            std::vector<char> sent(len), got(3000);
            std::iota(sent.begin(), sent.end(), '\0');
            ok(ginnel_message_send(channel.get(), sent.data(), sent.size()));
            got.resize(static_cast<std::size_t>(ok(ginnel_message_recv(channel.get(), got.data(), got.size()))));
            check(got == sent, "the message comes back");
        }
    }
    server.join();
}

static void streams(const Listener &listener)
{
    const std::string text(1 << 20, 'x');
    std::thread server([&] {
        Channel channel = accept(listener);
        ok(ginnel_stream_send_all(channel.get(), text.data(), text.size()));
    });
    Channel channel = connect("test/streams", GINNEL_STREAM);
    std::string got;
    char buffer[4096];
    while (ssize_t len = ok(ginnel_stream_recv(channel.get(), buffer, sizeof buffer)))
        got.append(buffer, static_cast<std::size_t>(len));
    check(got == text, "the stream comes whole, then ends");
    server.join();
}

int main()
{
    alarm(60);
    try {
        ginnel_endpoint *attached;
        ginnel_attach_options options{};
        options.size = sizeof options;
        options.name = "cxx";
        ok(ginnel_attach("test", &options, &attached));
        const Endpoint endpoint(attached);
        messages(listen(endpoint, "messages", GINNEL_MESSAGE));
        streams(listen(endpoint, "streams", GINNEL_STREAM));
        ginnel_channel *channel;
        check(ginnel_connect("test/messages", GINNEL_MESSAGE, nullptr, &channel) == GINNEL_ERR_REFUSED,
              "nobody listens any more");
    } catch (const std::exception &error) {
        std::cerr << error.what() << '\n';
        return EXIT_FAILURE;
    }
}
