package bench

import (
	"fmt"
	"strings"
)

// machine describes the machine and its servers. Durability is part of it: without fsync a commit costs nothing.
type machine struct {
	Cores      int               `json:"cores"`
	Platform   string            `json:"platform"`
	Load       float64           `json:"load_average_before"`
	Servers    string            `json:"servers"`
	Versions   map[string]string `json:"versions"`
	Durability map[string]string `json:"durability"`
}

func (m machine) text() string {
	servers := []string{"posthaste", "go", "postgres", "redis"}
	if m.Versions["nats"] != "" {
		servers = append(servers, "nats")
	}
	return fmt.Sprintf("machine: %d cores, %s, load average %.1f before the run; servers: %s\nversions: "+
		"%s\ndurability: "+
		"%s\n", m.Cores, m.Platform, m.Load, m.Servers,
		pairs(m.Versions, servers...),
		pairs(m.Durability, "fsync", "synchronous_commit", "full_page_writes", "appendonly", "appendfsync",
			"redis_durability"))
}

// pairs lists some values of m with their keys.
func pairs(m map[string]string, keys ...string) string {
	list := make([]string, len(keys))
	for i, k := range keys {
		list[i] = k + " " + m[k]
	}
	return strings.Join(list, ", ")
}
