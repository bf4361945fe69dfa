/* Sends each message back to its client; serves one client after another: echo_server [segment/name] */
#include <ginnel.h>
#include <stdio.h>

static char buffer[65536];

int main(int argc, char **argv)
{
    const char *address = argc > 1 ? argv[1] : "web/echo";
    ginnel_listener *listener;
    ginnel_channel *channel;

    if (ginnel_listen(address, GINNEL_MESSAGE, NULL, &listener) < 0)
        goto failed;
    while (ginnel_accept(listener, -1, &channel) == 0) {
        ssize_t len;
        while ((len = ginnel_message_recv(channel, buffer, sizeof buffer)) >= 0)
            if (ginnel_message_send(channel, buffer, (size_t)len) < 0)
                break;
        ginnel_channel_close(channel);
    }
failed:
    fprintf(stderr, "echo_server: %s\n", ginnel_last_error());
    return 1;
}
