// Command peers compares posthaste with its alternatives, on the same servers and in the same run. It starts a
// Postgres and a Redis that are durable as in production. In each round, every load runs with every peer in turn,
// each with an empty database and an empty Redis, and each round begins with another peer.
//
//	peers [--rounds=3] [--seconds=10] [--backlog=100000] [--rates=2000,5000,0] [--peers=…] [--json]
//
// `make bench-peers` calls it. Every peer is a process of its own, so that its processor time is measured apart from
// that of the servers and of the load; peers that are libraries are this program again, called with "peer" and a
// name.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/cli"
)

// quiet is a log for go-redis, which would say that a server that starts does not answer yet.
type quiet struct{}

// Printf implements the logger of go-redis.
func (quiet) Printf(context.Context, string, ...any) {}

func main() {
	redis.SetLogger(quiet{})
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], cli.IO{Stdout: os.Stdout, Stderr: os.Stderr})
	if ctx.Err() != nil {
		err = errors.New("interrupted; everything it started was stopped, and its data removed")
	}
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "peers:", err)
		os.Exit(1)
	}
}

// run is the program without its process.
func run(ctx context.Context, args []string, o cli.IO) error {
	if len(args) > 0 && args[0] == "peer" {
		return child(ctx, args[1:])
	}
	c, err := parse(args, o)
	if err != nil {
		return err
	}
	return measure(ctx, c, o)
}

// options are what is measured.
type options struct {
	rounds, backlog, size int
	lasts                 time.Duration
	rates                 []float64
	peers                 []peer
	dir, posthaste        string
	json                  bool
}

// parse reads the command line.
func parse(args []string, o cli.IO) (c options, err error) {
	flags := flag.NewFlagSet("peers", flag.ContinueOnError)
	flags.SetOutput(o.Stderr)
	flags.IntVar(&c.rounds, "rounds", 3, "how often everything is measured")
	seconds := flags.Float64("seconds", 10, "how long a load at a rate lasts")
	flags.IntVar(&c.backlog, "backlog", 100_000, "events that wait when a peer starts; 0 leaves this load out")
	rates := flags.String("rates", "2000,5000,0",
		"transactions of one event `per second`; 0: as many as 16 connections can")
	names := flags.String("peers", strings.Join(peerNames(), ","), "the peers to be `measured`")
	flags.IntVar(&c.size, "size", 300, "bytes of an event's payload")
	flags.StringVar(&c.dir, "dir", "", "`folder` for the servers' data, on the disk to be measured")
	flags.StringVar(&c.posthaste, "posthaste", "../bin/posthaste", "the `program` posthaste")
	flags.BoolVar(&c.json, "json", false, "print JSON instead of tables")
	if err := flags.Parse(args); err != nil {
		return c, err
	}
	if c.rounds < 1 || c.backlog < 0 || c.size < 100 || *seconds <= 0 || flags.NArg() > 0 {
		return c, errors.New("--rounds must be at least 1, --size 100, --seconds above 0, and nothing may follow")
	}
	c.lasts = time.Duration(*seconds * float64(time.Second))
	for r := range strings.SplitSeq(*rates, ",") {
		rate, err := strconv.ParseFloat(r, 64)
		if r != "" && (err != nil || rate < 0) {
			return c, fmt.Errorf("--rates: %q is not a number of transactions a second", r)
		}
		if r != "" {
			c.rates = append(c.rates, rate)
		}
	}
	chosen := strings.Split(*names, ",")
	for _, name := range chosen {
		if !slices.Contains(peerNames(), name) {
			return c, fmt.Errorf("--peers: %q is not one of %s", name, strings.Join(peerNames(), ", "))
		}
	}
	c.peers = choose(chosen)
	return c, nil
}
