/* Preloaded into a server, this makes every fdatasync take a while: a slow disk. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int fdatasync(int fd) {
	const char *ms = getenv("SLOWSYNC_MS");
	long n = ms ? atol(ms) : 0;
	struct timespec t = {n / 1000, n % 1000 * 1000000};
	nanosleep(&t, NULL);
	return (int)syscall(SYS_fdatasync, fd);
}
