// Lines on stderr: what a user must know, and the trace that MEMLAB_SIMULATED_TRACE=mem,launch,api asks for.
#include "simulated.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void print_line(const char *format, va_list arguments) {
    char line[1024];
    vsnprintf(line, sizeof line, format, arguments);
    fprintf(stderr, "memlab simulated GPU: %s\n", line);  // one call, so that threads do not tear each other's lines
}

void say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    print_line(format, arguments);
    va_end(arguments);
}

static int traced_kinds(void) {
    const char *wanted = getenv("MEMLAB_SIMULATED_TRACE");
    if (!wanted)
        return 0;
    return (strstr(wanted, "mem") ? TRACE_MEMORY : 0) | (strstr(wanted, "launch") ? TRACE_LAUNCHES : 0) |
           (strstr(wanted, "api") ? TRACE_CALLS : 0);
}

bool tracing(enum trace what) {
    static int kinds = -1;  // read once: the environment may change under a running program
    int now = __atomic_load_n(&kinds, __ATOMIC_RELAXED);
    if (now < 0) {
        now = traced_kinds();
        __atomic_store_n(&kinds, now, __ATOMIC_RELAXED);
    }
    return now & what;
}

void trace(enum trace what, const char *format, ...) {
    if (!tracing(what))
        return;
    va_list arguments;
    va_start(arguments, format);
    print_line(format, arguments);
    va_end(arguments);
}
