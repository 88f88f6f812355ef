/* A wall clock that is wrong by RLHF_TEST_CLOCK_OFFSET_S seconds, for the program that preloads this library.
 *
 * A deadline that a program computed from the wrong clock is corrected before the kernel sees it, as on a machine whose
 * own clock is wrong; otherwise a wait of one second would be longer by the whole offset.
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const long SECOND_NS = 1000000000;
/* Waits on a condition use either clock. Time since boot never gets that large; a date is always larger. */
static const time_t EARLIEST_DATE_S = 1000000000;

static struct timespec moved(struct timespec when, double by_s) {
    double whole_s = floor(by_s);
    when.tv_sec += (time_t)whole_s;
    when.tv_nsec += (long)((by_s - whole_s) * SECOND_NS);
    if (when.tv_nsec >= SECOND_NS) {
        when.tv_nsec -= SECOND_NS;
        when.tv_sec += 1;
    }
    return when;
}

static double offset_s(void) {
    const char *text = getenv("RLHF_TEST_CLOCK_OFFSET_S");
    return text ? atof(text) : 0;
}

static int is_wall_clock(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && is_wall_clock(clock)) *now = moved(*now, offset_s());
    return failed;
}

int timespec_get(struct timespec *now, int base) {
    return base == TIME_UTC && !clock_gettime(CLOCK_REALTIME, now) ? base : 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    if (deadline->tv_sec < EARLIEST_DATE_S)
        return pthread_cond_clockwait(condition, mutex, CLOCK_MONOTONIC, deadline);
    struct timespec truly = moved(*deadline, -offset_s());
    return pthread_cond_clockwait(condition, mutex, CLOCK_REALTIME, &truly);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    struct timespec truly = moved(*deadline, -offset_s());
    return sem_clockwait(semaphore, CLOCK_REALTIME, &truly);
}
