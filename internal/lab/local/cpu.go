package local

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/prometheus/procfs"
	"github.com/redis/go-redis/v9"
)

// CPU is the processor time of the server in seconds: of the postmaster, its children, and those that have ended. It
// is 0 if unknown, or if the server is down.
func (p *Postgres) CPU() (seconds float64) {
	const ticks = 100 // per second, see CPUTime
	text, err := os.ReadFile(filepath.Join(p.Dir, "data", "postmaster.pid"))
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), "\n")
	postmaster, _ := strconv.Atoi(first)
	procs, err := procfs.AllProcs()
	if err != nil {
		return 0 // not Linux
	}
	for _, p := range procs {
		s, err := p.Stat()
		switch {
		case err != nil: // it has ended meanwhile
		case s.PID == postmaster:
			seconds += processorTime(p, s) + float64(s.CUTime+s.CSTime)/ticks
		case s.PPID == postmaster:
			seconds += processorTime(p, s)
		}
	}
	return seconds
}

// processorTime is the time of a process with one thread, in seconds: to the nanosecond if the kernel has such
// statistics, else in ticks of 10 ms, of which an idle server uses few.
func processorTime(p procfs.Proc, s procfs.ProcStat) float64 {
	if exact, err := p.Schedstat(); err == nil && exact.RunningNanoseconds > 0 {
		return float64(exact.RunningNanoseconds) / 1e9
	}
	return s.CPUTime()
}

// RedisCPU is the processor time that a Redis reports, in seconds; 0 if it reports none.
func RedisCPU(ctx context.Context, client redis.Cmdable) (seconds float64) {
	info, _ := client.InfoMap(ctx, "cpu").Result()
	for _, name := range []string{"used_cpu_user", "used_cpu_sys"} {
		v, _ := strconv.ParseFloat(info["CPU"][name], 64)
		seconds += v
	}
	return seconds
}
