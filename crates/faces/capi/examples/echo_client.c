/* Sends a message to an echo server, and prints the answer: echo_client [segment/name [text]] */
#include <ginnel.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
    const char *address = argc > 1 ? argv[1] : "web/echo";
    const char *text = argc > 2 ? argv[2] : "hello";
    char answer[65536];
    ginnel_channel *channel;
    ssize_t len;

    if (ginnel_connect(address, GINNEL_MESSAGE, NULL, &channel) < 0 ||
        ginnel_message_send(channel, text, strlen(text)) < 0 ||
        (len = ginnel_message_recv(channel, answer, sizeof answer)) < 0) {
        fprintf(stderr, "echo_client: %s\n", ginnel_last_error());
        return 1;
    }
    printf("%.*s\n", (int)len, answer);
    ginnel_channel_close(channel);
    return 0;
}
