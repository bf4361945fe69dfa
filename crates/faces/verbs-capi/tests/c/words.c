// Prints the results of all functions without state. The output must be the same with the system's libibverbs and with this crate's.
#include <infiniband/verbs.h>
#include <stdio.h>

int main(void) {
    for (int value = -2; value < 40; value++) {
        printf("%d: %s, %s, %s, %s, %d, %d\n", value, ibv_wc_status_str(value), ibv_event_type_str(value),
               ibv_node_type_str(value), ibv_port_state_str(value), ibv_rate_to_mult(value), ibv_rate_to_mbps(value));
    }
    for (int value = -2; value < 1300000; value++) {
        if (mult_to_ibv_rate(value) || mbps_to_ibv_rate(value))
            printf("%d: %d, %d\n", value, mult_to_ibv_rate(value), mbps_to_ibv_rate(value));
    }
    return 0;
}
