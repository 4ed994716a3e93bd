package local

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// SentinelOptions are for a master, its replicas, and the Sentinels that monitor them.
type SentinelOptions struct {
	// Name is the name of the master; "" means posthaste.
	Name string
	// Replicas and Sentinels are numbers of servers. A majority of the Sentinels decides.
	Replicas, Sentinels int
	// Access is for the servers with data. The Sentinels use TLS if those do.
	Access
	// SentinelUser and SentinelPassword are for the clients of the Sentinels; see Access.
	SentinelUser, SentinelPassword string
	// Config are lines of redis.conf for the servers with data, SentinelConfig for the Sentinels.
	Config, SentinelConfig []string
}

// Sentinel is a master with replicas and Sentinels that this process owns.
type Sentinel struct {
	// Servers are the first master and the replicas, in no order after a failover.
	Servers   []*Redis
	Sentinels []*Redis

	o SentinelOptions
}

// StartSentinel starts all servers with their data below dir, and returns when the Sentinels know each other and the
// replicas. They replace a master that is unreachable for 2 s.
func StartSentinel(ctx context.Context, bin, dir string, o SentinelOptions) (*Sentinel, error) {
	o.Name = cmp.Or(o.Name, "posthaste")
	s := &Sentinel{o: o}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	if err := s.start(ctx, bin, dir); err != nil {
		_ = s.Kill()
		return nil, fmt.Errorf("start a master with sentinels: %w", err)
	}
	return s, nil
}

func (s *Sentinel) start(ctx context.Context, bin, dir string) error {
	add := func(to *[]*Redis, name string, change func(r *Redis)) error {
		r, err := addRedis(ctx, bin, filepath.Join(dir, name+strconv.Itoa(len(*to))), s.o.TLS, change)
		if err == nil {
			*to = append(*to, r)
		}
		return err
	}
	for i := range 1 + s.o.Replicas {
		err := add(&s.Servers, "server", func(r *Redis) {
			r.user, r.password = s.o.User, s.o.Password
			r.config = slices.Concat(r.config, []string{"repl-diskless-sync-delay 0"},
				s.o.config("masteruser", "masterauth"), s.o.Config)
			if i > 0 {
				r.config = append(r.config, fmt.Sprintf("replicaof 127.0.0.1 %d", s.Servers[0].Port))
			}
		})
		if err != nil {
			return err
		}
	}
	for range s.o.Sentinels {
		err := add(&s.Sentinels, "sentinel", func(r *Redis) {
			r.sentinel, r.user, r.password = true, s.o.SentinelUser, s.o.SentinelPassword
			r.config = s.sentinelConfig(r.Dir)
		})
		if err != nil {
			return err
		}
	}
	return s.Wait(ctx)
}

// sentinelConfig returns the configuration of one Sentinel.
func (s *Sentinel) sentinelConfig(dir string) []string {
	o, of := s.o, func(what string) string { return "sentinel " + what + " " + s.o.Name + " " }
	lines := []string{
		"bind 127.0.0.1", "dir " + dir, "daemonize no",
		fmt.Sprintf("%s127.0.0.1 %d %d", of("monitor"), s.Servers[0].Port, o.Sentinels/2+1),
		of("down-after-milliseconds") + "2000", of("failover-timeout") + "3000",
	}
	if o.User != "" {
		lines = append(lines, of("auth-user")+o.User)
	}
	if o.Password != "" {
		lines = append(lines, of("auth-pass")+o.Password)
	}
	// A Sentinel needs no keys and channels of a user, and connects to the others as a client.
	access := o.sentinels().config("sentinel sentinel-user", "sentinel sentinel-pass")
	return slices.Concat(lines, access, o.SentinelConfig)
}

// sentinels is the access to the Sentinels.
func (o SentinelOptions) sentinels() Access {
	return Access{User: o.SentinelUser, Password: o.SentinelPassword, TLS: o.TLS}
}

// Wait returns when all running Sentinels know each other, a reachable master and its running replicas.
func (s *Sentinel) Wait(ctx context.Context) error {
	running := func(list []*Redis) (n int) {
		for _, r := range list {
			if r.Running() {
				n++
			}
		}
		return n
	}
	return until(ctx, func() (err error) {
		for i, r := range s.Sentinels {
			if !r.Running() {
				continue
			}
			if e := s.knows(ctx, r, running(s.Servers)-1, running(s.Sentinels)); e != nil {
				err = fmt.Errorf("sentinel %d: %w", i, e)
			}
		}
		return err
	})
}

// knows checks the state of one Sentinel.
func (s *Sentinel) knows(ctx context.Context, r *Redis, replicas, sentinels int) error {
	client := r.connect(time.Second)
	defer client.Close()
	info, err := client.Info(ctx, "sentinel").Result()
	if err != nil {
		return err
	}
	if !strings.Contains(info, "status=ok") {
		return errors.New("the master is not known to be well")
	}
	var slaves, others int
	for field := range strings.SplitSeq(strings.TrimSpace(info), ",") {
		name, value, _ := strings.Cut(field, "=")
		switch name {
		case "slaves":
			slaves, _ = strconv.Atoi(value)
		case "sentinels":
			others, _ = strconv.Atoi(value)
		}
	}
	if slaves < replicas || others < sentinels {
		return fmt.Errorf("%d replicas of %d, %d sentinels of %d are known", slaves, replicas, others, sentinels)
	}
	return nil
}

// Master returns the index in Servers of the master according to the Sentinels.
func (s *Sentinel) Master(ctx context.Context) (int, error) {
	for _, r := range s.Sentinels {
		if !r.Running() {
			continue
		}
		client := r.connect(patience)
		addr, err := client.Do(ctx, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", s.o.Name).StringSlice()
		_ = client.Close()
		if err != nil || len(addr) == 0 {
			return 0, fmt.Errorf("no master is known: %w", err)
		}
		i := slices.IndexFunc(s.Servers, func(r *Redis) bool { return strconv.Itoa(r.Port) == addr[len(addr)-1] })
		if i < 0 {
			return 0, fmt.Errorf("the master is at %v", addr)
		}
		return i, nil
	}
	return 0, errors.New("no sentinel runs")
}

// URL is a client's URL: the Sentinels, the users there and at the master, and the master's name.
func (s *Sentinel) URL() string {
	q := url.Values{"master_name": {s.o.Name}}
	for _, r := range s.Sentinels[1:] {
		q.Add("addr", r.Addr())
	}
	if s.o.User != "" {
		q.Set("username", s.o.User)
	}
	if s.o.Password != "" {
		q.Set("password", s.o.Password)
	}
	u := url.URL{
		Scheme: s.o.scheme(), User: s.o.sentinels().userinfo(), Host: s.Sentinels[0].Addr(), Path: "/0",
		RawQuery: q.Encode(),
	}
	return u.String()
}

// Kill ends all servers with SIGKILL and waits for them.
func (s *Sentinel) Kill() error {
	return errors.Join(all(s.Sentinels, (*Redis).Kill), all(s.Servers, (*Redis).Kill))
}
