{{- define "tonnage.fullname" -}}
{{- default (printf "%s-%s" .Release.Name (default .Chart.Name .Values.nameOverride)) .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "tonnage.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tonnage.labels" -}}
{{ include "tonnage.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Fail with the reason if values contradict the plan or each other. */}}
{{- define "tonnage.check" -}}
{{- $v := .Values -}}
{{- $memory := int64 $v.resources.memoryBytes -}}
{{- $used := int64 $v.plan.usedBytes -}}
{{- if and $used $memory (lt $memory $used) -}}
{{- if not (int $v.plan.gpus) -}}
{{- fail (printf "resources.memoryBytes: %d is less than the %d bytes that plan %s uses" $memory $used $v.plan.id) -}}
{{- end -}}
{{- end -}}
{{- $host := int64 $v.plan.hostBytes -}}
{{- if and $host $memory (lt $memory $host) -}}
{{- fail (printf "resources.memoryBytes: %d is less than the %d bytes of host memory that plan %s needs" $memory $host $v.plan.id) -}}
{{- end -}}
{{- $shared := int64 $v.sharedMemoryBytes -}}
{{- if and $memory (gt $shared $memory) -}}
{{- fail (printf "sharedMemoryBytes: %d is more than the container's memory, %d (resources.memoryBytes), which includes /dev/shm" $shared $memory) -}}
{{- end -}}
{{- if and $v.plan.id (ne (int $v.resources.gpus) (int $v.plan.gpus)) -}}
{{- fail (printf "resources.gpus: %d, but plan %s needs %d (tensor x pipeline parallel)" (int $v.resources.gpus) $v.plan.id (int $v.plan.gpus)) -}}
{{- end -}}
{{- $pool := int64 (default 0 $v.settings.kv_cache_memory_bytes) -}}
{{- if and (int64 $v.plan.kvPoolBytes) (ne $pool (int64 $v.plan.kvPoolBytes)) -}}
{{- fail (printf "settings.kv_cache_memory_bytes: %d, but plan %s sizes the pool at %d" $pool $v.plan.id (int64 $v.plan.kvPoolBytes)) -}}
{{- end -}}
{{- $device := int64 (default 0 $v.settings.device_memory) -}}
{{- if and (eq (toString (default "cpu" $v.settings.device)) "cpu") $memory $device (gt $device $memory) -}}
{{- fail (printf "settings.device_memory: %d bytes, but the container gets %d (resources.memoryBytes)" $device $memory) -}}
{{- end -}}
{{- if and (int $v.resources.gpus) (eq (toString (default "cpu" $v.settings.device)) "cpu") -}}
{{- fail "settings.device: cpu, but resources.gpus requests GPUs; set settings.device: cuda or resources.gpus: 0" -}}
{{- end -}}
{{- $grace := add (int $v.preStopSeconds) (int $v.drainSeconds) 5 -}}
{{- if lt (int $v.terminationGracePeriodSeconds) (int $grace) -}}
{{- fail (printf "terminationGracePeriodSeconds: %d is less than preStopSeconds + drainSeconds + 5 = %d: requests would be cut off" (int $v.terminationGracePeriodSeconds) (int $grace)) -}}
{{- end -}}
{{- if $v.vllmServe.enabled -}}
{{- if ne $v.backend "vllm" -}}
{{- fail (printf "vllmServe.enabled: true, but backend is %s: make the plan with --engine vllm" $v.backend) -}}
{{- end -}}
{{- if eq $v.model "demo" -}}
{{- fail "model: demo is Tonnage's own; vllm serve needs a hub id or a folder" -}}
{{- end -}}
{{- if and $v.apiKeys.secretName (eq $v.apiKeys.secretKey "keys.toml") -}}
{{- fail "apiKeys.secretKey: keys.toml is a file of keys, but vllm serve needs one key in plain text" -}}
{{- end -}}
{{- else if and $v.apiKeys.secretName (not $v.apiKeys.metricsPublic) -}}
{{- if and $v.serviceMonitor.enabled (not $v.apiKeys.metricsSecretKey) -}}
{{- fail "apiKeys.metricsSecretKey: serviceMonitor needs an API key that may read /metrics; set it, or apiKeys.metricsPublic: true" -}}
{{- end -}}
{{- if $v.inferencePool.enabled -}}
{{- fail "apiKeys.metricsPublic: false, but the endpoint picker of inferencePool reads /metrics without a key" -}}
{{- end -}}
{{- end -}}
{{- if and $v.autoscaling.enabled (gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) -}}
{{- fail "autoscaling.minReplicas is above autoscaling.maxReplicas" -}}
{{- end -}}
{{- $fewest := ternary (int $v.autoscaling.minReplicas) (int $v.replicas) $v.autoscaling.enabled -}}
{{- if and $v.podDisruptionBudget.enabled (gt $fewest 1) (ge (int $v.podDisruptionBudget.minAvailable) $fewest) -}}
{{- fail (printf "podDisruptionBudget.minAvailable: %d of %d replicas would block every drain of a node" (int $v.podDisruptionBudget.minAvailable) $fewest) -}}
{{- end -}}
{{- end -}}

{{/* Format a value for a flag or a variable; Helm reads every number as a float. */}}
{{- define "tonnage.text" -}}
{{ if kindIs "float64" . }}{{ if eq . (floor .) }}{{ . | int64 }}{{ else }}{{ . }}{{ end }}{{ else }}{{ . }}{{ end }}
{{- end -}}

{{/* Arguments of vllm serve: the model, the settings (with vLLM's names), and vllmServe's own values. */}}
{{- define "tonnage.vllmArgs" -}}
{{- $v := .Values -}}
{{- $same := list "gpu_memory_utilization" "dtype" "kv_cache_dtype" "kv_cache_memory_bytes" "max_model_len" "max_num_seqs" "max_num_batched_tokens" "block_size" "tensor_parallel_size" "pipeline_parallel_size" -}}
- {{ $v.model | quote }}
- --host=0.0.0.0
- --port=8000
- --shutdown-timeout={{ $v.drainSeconds }}
{{- range $name, $value := $v.settings }}
{{- if has $name $same }}
- --{{ $name | replace "_" "-" }}={{ include "tonnage.text" $value }}
{{- else if not (has $name (list "device" "device_memory")) }}
{{- fail (printf "settings.%s: vllm serve has no such flag; its own go under vllmServe.args" $name) }}
{{- end }}
{{- end }}
{{- if $v.vllmServe.admissionMode }}
- --scheduler-cls=tonnage.server.engines.vllm.scheduler.TonnageScheduler
{{- end }}
{{- range $v.vllmServe.args }}
- {{ . | quote }}
{{- end }}
{{- end -}}
