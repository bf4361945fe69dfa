// A substitute for the real libibverbs and librdmacm: its functions have more arguments, and of more kinds, than the real ones.
#include <stdarg.h>
#include <stddef.h>

static int drivers;

void verbs_register_driver_34(const void *driver) {
    if (driver)
        drivers++;
}

// This function has another meaning in the real library.
int ibv_dofork_range(void *base, size_t size) {
    (void)base;
    (void)size;
    return drivers;
}

double ibv_cmd_reg_mr(long a, long b, long c, long d, long e, long f, long g, long h, double i, double j, double k,
                      double l, double m, double n, double o, double p, double q) {
    return a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * j + 11 * k + 12 * l + 13 * m +
           14 * n + 15 * o + 16 * p + 17 * q;
}

int ibv_cmd_dealloc_pd(int value) { return value + 1; }

int repoll_ctl(int count, int command, ...) {
    va_list list;
    double sum = command;
    va_start(list, command);
    for (int at = 0; at < count; at++)
        sum += va_arg(list, int) * (at + 1);
    for (int at = 0; at < count; at++)
        sum += va_arg(list, double) * (at + 1);
    va_end(list);
    return (int)sum;
}
